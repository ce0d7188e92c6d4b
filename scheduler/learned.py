"""Which estimate of a prefill and of a decode step counts for which worker.

Workers that say that they are alike share one of prefills, each by its own ``Speed``. Who does not say what it is has its own
once it has measured enough, and its role's before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.core.ids import Role
from moonpool.core.membership import WorkerReport
from moonpool.scheduler.board import Kind, Worker
from moonpool.scheduler.estimates import Fit, PrefillEstimate, Seeds, StepEstimate

WORKER_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)


class Learned:
    """From the reports of all workers."""

    def __init__(self, seeds: Seeds | None = None) -> None:
        self._seeds = seeds or Seeds()
        self._of_role = {role: (PrefillEstimate(self._seeds.prefill), StepEstimate(self._seeds.step)) for role in WORKER_ROLES}
        self._of_kind: dict[Kind, PrefillEstimate] = {}
        self._told: dict[tuple[Role, Kind | None], tuple[Fit, ...]] = {}  # by ``others``

    def learn(self, worker: Worker, report: WorkerReport) -> None:
        for prefill, step in ((worker.prefill, worker.step), self._of_role[worker.member.role]):
            for timing in report.prefills:
                prefill.add(timing)
            for measured in report.steps:
                step.add(measured)
        if (kind := worker.kind) is None or not report.prefills:
            return
        alike = self._of_kind.setdefault(kind, PrefillEstimate(self._seeds.prefill))
        for timing in report.prefills:
            alike.add(timing)
            worker.speed.add(timing)
        if alike.fit.sure:
            worker.speed.compare(alike.fit)

    def forget(self, lost: Worker, left: Iterable[Worker]) -> None:
        """``lost`` is gone: where it was the last of its kind, so is what that took."""
        if (kind := lost.kind) is not None and all(worker.kind != kind for worker in left):
            self._of_kind.pop(kind, None)
            self._told.pop((lost.member.role, kind), None)

    def fits(self, worker: Worker) -> tuple[Fit, Fit]:
        """Of a prefill and of a step."""
        return self._prefill(worker), self.step(worker)

    def step(self, worker: Worker) -> Fit:
        return worker.step.fit if worker.step.fit.sure else self._of_role[worker.member.role][1].fit

    def others(self, reported: Worker, workers: Iterable[Worker]) -> Iterator[Worker]:
        """Of ``workers`` those whose fits may be others because of what ``reported`` told since this was last asked.

        One that has done nothing yet reports nothing new, and by the first guess it would never be given anything to do.
        """
        role, kind = reported.member.role, reported.kind
        prefill, step = self._of_role[role]
        alike = self._of_kind.get(kind) if kind is not None else None
        learned = (prefill.fit, step.fit) if alike is None else (prefill.fit, step.fit, alike.fit)
        if self._told.get((role, kind)) == learned:
            return
        self._told[role, kind] = learned
        for worker in workers:
            unsure = not (worker.prefill.fit.sure and worker.step.fit.sure)
            if unsure or (alike is not None and worker.kind == kind):
                yield worker

    def _prefill(self, worker: Worker) -> Fit:
        alike = self._of_kind.get(worker.kind) if worker.kind is not None else None
        if alike is not None and alike.fit.sure:
            return alike.fit.times(worker.speed.factor)
        prefill, _ = self._of_role[worker.member.role]
        if worker.member.role is Role.DECODE and not prefill.fit.sure:
            prefill = self._of_role[Role.PREFILL][0]  # decode workers compute few prompts, on machines like theirs
        return worker.prefill.fit if worker.prefill.fit.sure else prefill.fit
