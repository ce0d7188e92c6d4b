"""``moonpool chaos``: a live local cluster under load is struck again and again, and every answer is checked."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moonpool.bench.chaos import checks, clocks, network
from moonpool.bench.chaos.attempts import Further
from moonpool.bench.chaos.catalogue import Conversation, Sizes
from moonpool.bench.chaos.house import DEVICE_BYTES, Choices, House
from moonpool.bench.chaos.kinds import Kind, Need, chosen
from moonpool.bench.chaos.load import Load
from moonpool.bench.chaos.members import MEMBERS
from moonpool.bench.chaos.oracle import Wanted, answered
from moonpool.bench.chaos.runlog import RunLog
from moonpool.bench.chaos.schedule import Planned, least, plan
from moonpool.bench.chaos.striking import PATIENCE_S, STARTS, Striking
from moonpool.bench.chaos.tally import End, Tally, figures
from moonpool.bench.local_cluster import terminable
from moonpool.bench.tiny_model import TINY_CONTEXT, TINY_IDS, make_tiny_model

WARM_S = 4.0


@dataclass(frozen=True, slots=True)
class Options:
    """``kinds``: names, or beginnings of names; none: all. ``model`` empty: the tiny one. ``log`` None: kept with ``keep``."""

    minutes: float = 20.0
    seed: int = 0
    kinds: tuple[str, ...] = ()
    model: str = ""
    registry: str = "embedded"
    settings: tuple[tuple[str, str], ...] = ()
    log: Path | None = None
    picture: Path | None = None
    keep: bool = False


def possible(kinds: Sequence[Kind]) -> tuple[list[Kind], dict[str, str]]:
    """The kinds that this machine allows, and why it does not allow the others."""
    namespaces = network.why_not()
    lacking = {Need.NETWORK: namespaces, Need.DISK: namespaces, Need.COMPILER: clocks.why_not()}
    skipped = {kind.name: lacking[kind.need] for kind in kinds if kind.need and lacking[kind.need]}
    return [kind for kind in kinds if kind.name not in skipped], skipped


def chaos(options: Options) -> dict[str, object]:
    """The figures of one run; progress on standard error. Call it in the main thread, before anything else has begun.

    ConfigError where the cluster does not start. Everything that it started has ended when it returns.
    """
    with terminable():
        return _chaos(options)


def _chaos(options: Options) -> dict[str, object]:
    from moonpool.cluster.models import local_model

    kinds, skipped = possible(chosen(options.kinds))
    given = local_model(options.model, _say) if options.model else None
    folder = Path(tempfile.mkdtemp(prefix="moonpool-chaos-"))
    net = None if network.why_not() else network.Network(MEMBERS)
    clock = None if clocks.why_not() else clocks.Clocks(folder / "clocks")
    try:
        if net:
            net.enter()
            _small_file_system(folder / "ssd")
        if clock:
            clock.build()
        choices = Choices(options.registry, dict(options.settings))
        model = given or make_tiny_model(folder / "model")
        house = House(folder, model, choices, network=net, clocks=clock, tiny=given is None)
        tally = Tally(skipped=skipped, least=least(options.minutes))
        with RunLog(options.log or folder / "run.jsonl") as log:
            seconds = asyncio.run(_Run(options, house, tally, log, kinds, model, given is None).run())
        found = figures(tally, seconds)
        if options.picture:
            from moonpool.bench.chaos.picture import draw

            draw(tally, seconds, options.picture)
        return found
    finally:
        for thing in (net, clock):
            if thing:
                thing.close()
        if options.keep:
            _say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _small_file_system(folder: Path) -> None:
    """In this process's own mount namespace: it goes with it."""
    import subprocess

    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2 * DEVICE_BYTES}", "tmpfs", str(folder)], check=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Run:
    def __init__(
        self, options: Options, house: House, tally: Tally, log: RunLog, kinds: Sequence[Kind], model: Path, tiny: bool
    ) -> None:
        self._options, self._house, self._tally, self._log = options, house, tally, log
        self._model, self._tiny = model, tiny
        self._plan: list[Planned] = plan(kinds, options.minutes, options.seed)
        tally.planned.update(planned.kind.name for planned in self._plan)

    async def run(self) -> float:
        """Seconds of load. Fills the tally."""
        house, options = self._house, self._options
        self._log.write("plan", minutes=options.minutes, seed=options.seed, strikes=len(self._plan), folder=str(house.folder))
        began = time.monotonic()
        try:
            await asyncio.to_thread(house.begin)
            asked = await asyncio.to_thread(answered, self._wanted(), house.config, self._model)
            await house.ready()
            took = time.monotonic() - began
            _say(f"ready after {took:.1f} s; {len(asked)} conversations, {len(self._plan)} strikes planned")
            seconds = await self._under_load(asked, max(PATIENCE_S, STARTS * took))
        finally:
            self._tally.leaks += await asyncio.to_thread(house.end)
        self._tally.leaks += checks.strays(house) + checks.region_files(house, owners=False)
        self._log.write("over", failures=self._tally.faults(), leaks=self._tally.leaks)
        return seconds

    def _wanted(self) -> Wanted:
        count = min(240, 40 + int(16 * self._options.minutes))
        if self._tiny:
            return Wanted(count, (0, TINY_IDS), self._options.seed, Sizes(context=TINY_CONTEXT))
        return Wanted(count // 4, (1000, 40_000), self._options.seed, Sizes(answer=(8, 32)))

    async def _under_load(self, asked: Sequence[Conversation], patience_s: float) -> float:
        house, log = self._house, self._log
        await self._warm(asked)
        before = await house.numbers()
        load = Load(asked, house.urls, log, self._options.seed)
        striking, further = Striking(house, load, log, self._tally.least, patience_s), Further(house.urls)
        log.begin()
        load.begin()
        beside = [asyncio.create_task(further.watch()), asyncio.create_task(self._progress(load, striking))]
        try:
            until = self._options.minutes * 60
            await striking.carry_out(self._plan, until)
            await asyncio.sleep(max(0.0, until - log.now()))
            seconds = log.now()
            await load.end()
            await asyncio.sleep(0.6)  # the last attempts are told
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await load.abandon()
            self._tally.ended, self._tally.struck, self._tally.resumed = load.ended, striking.struck, further.seen
        if missing := await self._back(patience_s):
            self._tally.leaks += [f"{name}: not live and ready again" for name in missing]
        self._tally.leaks += await checks.idle(house)
        self._tally.leaks += checks.grown(before, await house.numbers()) + checks.region_files(house, owners=True)
        return seconds

    async def _back(self, patience_s: float) -> list[str]:
        until = time.monotonic() + patience_s
        while True:
            missing = await self._house.unready(MEMBERS)
            if not missing or time.monotonic() > until:
                return missing
            await asyncio.sleep(0.2)

    async def _warm(self, asked: Sequence[Conversation]) -> None:
        """Every lazy connection and thread is there afterwards."""
        load = Load(asked, self._house.urls, self._log, self._options.seed + 1)
        load.begin()
        await asyncio.sleep(WARM_S)
        await load.end()
        await checks.idle(self._house)
        wrong = [one for one in load.ended if one.end not in (End.COMPLETED, End.CANCELLED)]
        if wrong:
            self._tally.ended += wrong
            _say(f"before any fault: {wrong[:3]}")

    async def _progress(self, load: Load, striking: Striking) -> None:
        live = sys.stderr.isatty()
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(1.0 if live else 10.0)
                ends = {end: sum(one.end is end for one in load.ended) for end in End}
                text = ", ".join(f"{n} {end.value}" for end, n in ends.items() if n)
                line = f"{self._log.now():6.0f} s  {len(striking.struck)} strikes  {text}  now: {striking.open_names or '-'}"
                print(f"\r{line[:140]:<140}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
