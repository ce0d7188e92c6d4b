"""Runs, two at a time. A run that fails is told apart from one that was not wanted; the others go on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from moonpool.sim.suite.finished import Figures, Finished
from moonpool.sim.suite.measure import measure
from moonpool.sim.suite.settings import AnyRun, CacheRun, ClusterRun, ForcedRun, Job, PredictionRun, SpeedRun

Told = Callable[[str], None]


def perform(
    runs: Sequence[AnyRun], traces: Path | None, *, finished: Finished, processes: int, tell: Told
) -> Iterator[tuple[AnyRun, Figures | str]]:
    """Each run with its figures, or with why there are none, as they end. What ``finished`` has is not run again."""
    left = []
    for run in runs:
        if (known := finished.get(run)) is not None:
            yield run, known
        else:
            left.append(Job(run=run, traces=traces))
    left.sort(key=lambda job: -_weight(job.run))  # the longest first, so that no process waits for the other at the end
    tell(f"{len(runs) - len(left)} of {len(runs)} runs are finished already")
    for done, (job, answer) in enumerate(_answers(left, processes), 1):
        if isinstance(answer, str):
            tell(f"[{done}/{len(left)}] {title(job.run)}: FAILED: {answer}")
        else:
            finished.put(job.run, answer)
            tell(f"[{done}/{len(left)}] {title(job.run)}: {answer.get('wall_s', 0.0):.1f} s")
        yield job.run, answer


def _answers(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Figures | str]]:
    if processes < 2 or len(jobs) < 2:
        for job in jobs:
            yield job, tried(job)
        return
    context = multiprocessing.get_context("spawn")  # a forked child would keep the parent's threads' locks
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running: dict[Future[Figures | str], Job] = {}
        todo = list(reversed(jobs))
        try:
            while todo or running:
                while todo and len(running) < processes:
                    job = todo.pop()
                    running[pool.submit(tried, job)] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()


def tried(job: Job) -> Figures | str:
    """The figures of one run, or what went wrong: one broken run must not end the suite."""
    try:
        return measure(job)
    except Exception as e:  # noqa: BLE001 - it is reported as the row's failure
        return f"{type(e).__name__}: {e}"


def _weight(run: AnyRun) -> float:
    """How long a run takes, roughly, next to others."""
    match run:
        case ForcedRun():
            return 20.0 * _weight(run.base)
        case SpeedRun():
            return 6.0 * _weight(run.base)
        case ClusterRun():
            rows = {"conversation": 12_000, "synthetic": 4_000, "made": 2_000}[run.workload.trace]
            return float(min(rows, run.workload.first or rows)) * (2.0 if run.policy == "moonpool" else 1.0)
        case _:
            return 0.0


def title(run: AnyRun) -> str:
    match run:
        case CacheRun():
            return f"{run.eviction} cache of {run.tokens / 1e6:g} M tokens, {run.workload.title}"
        case PredictionRun():
            return f"prefill prediction, {run.workload.title if run.workload else 'fig. 14'}"
        case ClusterRun():
            return (
                f"{run.policy} {run.prefill}P{run.decode}D {run.order} {run.eviction} x{run.speed:g}, {run.admission}, "
                f"{run.workload.title}"
            )
        case SpeedRun() | ForcedRun():
            return f"{run.kind}: {title(run.base)}"
