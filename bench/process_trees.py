"""What all processes of one side together hold and burn, and stopping them for a while."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from moonpool.cluster.launch.state import StateDir

_STOP_S = 2.0  # a thread inside the kernel stops when it leaves it


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; nothing where it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cluster_processes(state_dir: Path) -> list[psutil.Process]:
    """Supervisor and members of the cluster with that state folder, wherever in the process tree they hang."""
    directory = StateDir(state_dir)
    state = directory.read()
    roots = [*([state.supervisor.pid] if state else []), *(record.pid for record in directory.recorded().values())]
    return list({process.pid: process for root in roots for process in tree_of(root)}.values())


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Proportional set size: a page that n processes share counts 1/n in each, so that it counts once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time so far. The children that they list are taken only where listed."""
    total = 0.0
    for process in processes:
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system
    return total


def idle_share(processes: Sequence[psutil.Process], seconds: float) -> float:
    """CPU seconds per second while nobody asks anything: of one core. Blocks for ``seconds``."""
    before, began = cpu_seconds(processes), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(processes) - before) / (time.monotonic() - began)


def bound_cpus(processes: Sequence[psutil.Process]) -> dict[str, int]:
    """How many threads may run on which CPUs: {"0": 1, "1": 1, "0,1": 40}."""
    found: dict[str, int] = {}
    for process in processes:
        try:
            threads = [thread.id for thread in process.threads()]
        except psutil.NoSuchProcess:
            continue
        for thread in threads:
            try:
                cpus = ",".join(map(str, sorted(os.sched_getaffinity(thread))))
            except ProcessLookupError:
                continue
            found[cpus] = found.get(cpus, 0) + 1
    return found


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """None of them runs inside the block (SIGSTOP); all go on afterwards."""
    try:
        _signal(processes, signal.SIGSTOP)
        until = time.monotonic() + _STOP_S
        while not all(map(_is_stopped, processes)) and time.monotonic() < until:
            time.sleep(0.001)
        yield
    finally:
        _signal(processes, signal.SIGCONT)


def _is_stopped(process: psutil.Process) -> bool:
    """Or gone."""
    try:
        return bool(process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.NoSuchProcess:
        return True


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
