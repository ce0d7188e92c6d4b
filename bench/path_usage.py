"""What a cluster of one machine used between two moments: CPU seconds by role, tokens, messages, events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from moonpool.cluster.survey import members, survey
from moonpool.core.membership import Liveness

CLIENT, SUPERVISOR = "client", "supervisor"
COUNTED = ("tokens_count", "messages_count", "steps_count", "event_head")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of ``seconds``. ``cpu_s``: by role, those of the client and of the cluster's supervisor with them."""

    seconds: float
    cpu_s: Mapping[str, float]
    tokens: float
    messages: float  # on token streams
    steps: float
    events: float  # of store nodes


@dataclass(frozen=True, slots=True)
class Watched:
    """Processes by role, whose names are asked for once: asking costs them something."""

    processes: tuple[tuple[str, psutil.Process], ...]

    @classmethod
    async def of(cls, registry: str, supervisor: int) -> Watched:
        live = [change.member for change in await members(registry) if change.liveness is Liveness.LIVE]
        named = [*((one.role.value, one.pid) for one in live), (SUPERVISOR, supervisor), (CLIENT, psutil.Process().pid)]
        return cls(tuple((role, psutil.Process(pid)) for role, pid in named))

    def cpu_s(self) -> dict[str, float]:
        """User and system time of all threads so far."""
        used: Counter[str] = Counter()
        for role, process in self.processes:
            times = process.cpu_times()
            used[role] += times.user + times.system
        return dict(used)


class Meter:
    """Between ``begin`` and ``end``. Neither counts what it asks."""

    def __init__(self, registry: str, watched: Watched) -> None:
        self._registry, self._watched = registry, watched
        self._counted: dict[str, float] = {}
        self._cpu_s: dict[str, float] = {}
        self._at = 0.0

    async def begin(self) -> None:
        self._counted = await self._counts()
        self._cpu_s, self._at = self._watched.cpu_s(), time.monotonic()

    async def end(self) -> Usage:
        seconds, cpu = time.monotonic() - self._at, self._watched.cpu_s()
        counted = {name: value - self._counted[name] for name, value in (await self._counts()).items()}
        used = {role: cpu[role] - self._cpu_s[role] for role in cpu}
        return Usage(
            seconds, used, counted["tokens_count"], counted["messages_count"], counted["steps_count"], counted["event_head"]
        )

    async def _counts(self) -> dict[str, float]:
        numbers = [answer.numbers for answer in await survey(self._registry)]
        return {name: sum(one.get(name, 0.0) for one in numbers) for name in COUNTED}
