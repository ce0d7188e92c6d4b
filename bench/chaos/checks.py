"""What must be so when a run is over: idle gauges, handles as at the start, files and processes of nobody gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from moonpool.bench.chaos.house import House
from moonpool.core.idle import not_idle
from moonpool.kvstore.regions import DEFAULT_DIRECTORY

IDLE_S = 20.0
HANDLES = {"process_threads": 6.0, "process_sockets": 10.0, "process_handles": 14.0}  # how much a life may differ from another
Numbers = Mapping[str, Mapping[str, float]]


async def idle(house: House, limit_s: float = IDLE_S) -> list[str]:
    """What is not idle after ``limit_s``, one line each; returns at once when nothing is."""
    until = time.monotonic() + limit_s
    while True:
        await house.unready(())  # refreshes who is live, and where
        numbers = await house.numbers()
        busy = [f"{name}: {gauge} = {value:g}" for name, of in numbers.items() for gauge, value in not_idle(of).items()]
        if not busy or time.monotonic() > until:
            return busy
        await asyncio.sleep(0.2)


def grown(before: Numbers, after: Numbers) -> list[str]:
    """Members with clearly more threads, sockets or descriptors than at the start of the run."""
    return [
        f"{name}: {what} grew from {before[name][what]:g} to {now[what]:g}"
        for name, now in after.items()
        for what, slack in HANDLES.items()
        if name in before and now[what] > before[name][what] + slack
    ]


def region_files(house: House, *, owners: bool) -> list[str]:
    """Region files of this cluster that no living store node owns; with ``owners`` False, all of them."""
    folder = Path(house.config.store.directory or DEFAULT_DIRECTORY)
    pids = {house.pid(f"store-{node.name}") for node in house.config.cluster.nodes} if owners else set()
    files = sorted(folder.glob(f"moonpool+{house.name}+*"))
    return [f"region file {path.name}" for path in files if int(path.name.split("+")[3]) not in pids]


def strays(house: House) -> list[str]:
    """Processes whose command line names this run's folder, after all of them were stopped."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != psutil.Process().pid and any(str(house.folder / "state") in word for word in words):
            found.append(f"process {process.pid} is left: {' '.join(words)[:120]}")
    return found
