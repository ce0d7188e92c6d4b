"""Carries out a schedule: strikes when it may, ends what holds, and watches until everybody is back.

One side at a time: while members of one node id are struck, those of the other serve. A strike on the other side, and one on a
process that is still coming back, waits; one that could not happen within ``patience_s`` is left out and logged. The registry
is struck alone. On a machine so slow that kinds have not struck often enough when the time is over, a run takes longer, twice
its time at most.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from moonpool.bench.chaos.faults import FAULTS, Fault
from moonpool.bench.chaos.house import House
from moonpool.bench.chaos.kinds import REGISTRY
from moonpool.bench.chaos.load import GATEWAYS, Load
from moonpool.bench.chaos.members import MEMBERS
from moonpool.bench.chaos.runlog import RunLog
from moonpool.bench.chaos.schedule import Planned, may_strike, side_of
from moonpool.bench.chaos.tally import Struck

PATIENCE_S = 60.0  # at least; where processes take long to start,
STARTS = 3.0  # so many times what the whole cluster took
LOOK_S = 0.2
CLOSEST_S = 1.0  # between two strikes that are both late


class Striking:
    def __init__(self, house: House, load: Load, log: RunLog, least: int, patience_s: float) -> None:
        self._least, self._patience_s = least, patience_s
        self._house, self._load, self._log = house, load, log
        self._open: dict[int, tuple[Struck, Fault]] = {}
        self._changed = asyncio.Event()
        self._holds: set[asyncio.Task[None]] = set()
        self.struck: list[Struck] = []

    async def carry_out(self, plan: Sequence[Planned], until_s: float) -> None:
        """Until the last strike is over. Cancelled, or failing, it leaves nothing held."""
        watching = asyncio.create_task(self._watch(), name="chaos-watch")
        try:
            for planned in plan:
                await self._sleep_until(planned.at_s)
                late = self._log.now() - until_s
                if late > 0 and (late > until_s or self._enough(planned)):
                    self._log.write("left out", number=planned.number, kind=planned.kind.name, why="the time is over")
                    continue
                await self._strike(planned)
                await asyncio.sleep(CLOSEST_S)
            await self._until(lambda: not self._open, max(until_s - self._log.now(), 0.0) + self._patience_s)
        finally:
            for task in (watching, *self._holds):
                task.cancel()
            await asyncio.gather(watching, *self._holds, return_exceptions=True)
            for struck, fault in self._open.values():
                if struck.healed_s is None:
                    fault.heal()

    @property
    def open_names(self) -> str:
        return ", ".join(struck.kind for struck, _ in self._open.values())

    def _enough(self, planned: Planned) -> bool:
        return sum(struck.kind == planned.kind.name for struck in self.struck) >= self._least

    async def _strike(self, planned: Planned) -> None:
        if not await self._until(lambda: may_strike(planned, [struck for struck, _ in self._open.values()]), self._patience_s):
            self._log.write(
                "left out", number=planned.number, kind=planned.kind.name, why=f"others were open: {self.open_names}"
            )
            return
        fault = FAULTS[planned.kind.what](planned, self._house)
        struck = Struck(planned.number, planned.kind.name, side_of(planned), (), self._log.now())
        flying = sorted(self._load.in_flight)
        struck.hit = fault.strike(np.random.default_rng(planned.seed))
        struck.targets = fault.targets
        self._gateways_struck(struck, until=math.inf)
        self._open[planned.number] = (struck, fault)
        self.struck.append(struck)
        self._log.write(
            "strike", number=struck.number, kind=struck.kind, hit=struck.hit, targets=list(struck.targets),
            hold_s=round(planned.hold_s, 2), in_flight=flying,
        )  # fmt: skip
        hold = asyncio.create_task(self._hold(planned, struck, fault))
        self._holds.add(hold)
        hold.add_done_callback(self._held)

    def _held(self, hold: asyncio.Task[None]) -> None:
        self._holds.discard(hold)
        if not hold.cancelled() and (error := hold.exception()) is not None:
            self._log.write("trouble", why=f"{type(error).__name__}: {error}")

    async def _hold(self, planned: Planned, struck: Struck, fault: Fault) -> None:
        until = struck.at_s + planned.hold_s
        while (left := until - self._log.now()) > 0:
            if fault.over():
                break
            await asyncio.sleep(min(0.05, left))
        await asyncio.to_thread(fault.heal)
        struck.healed_s = self._log.now()
        self._log.write("healed", number=struck.number, kind=struck.kind)

    async def _watch(self) -> None:
        """Closes strikes whose targets are back."""
        while True:
            for struck, fault in list(self._open.values()):
                wanted = tuple(t for t in struck.targets if t != REGISTRY) or MEMBERS
                if struck.healed_s is None or await self._house.unready(wanted, without=fault.killed):
                    continue
                struck.restored_s = self._log.now()
                self._gateways_struck(struck, until=struck.restored_s)
                self._log.write("restored", number=struck.number, kind=struck.kind)
                del self._open[struck.number]
                self._changed.set()
            await asyncio.sleep(LOOK_S)

    def _gateways_struck(self, struck: Struck, *, until: float) -> None:
        for gateway in set(GATEWAYS) & set(struck.targets):
            self._load.gateway_struck[gateway] = until

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._log.now()))

    async def _until(self, true: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
