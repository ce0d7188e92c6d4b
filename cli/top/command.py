"""``moonpool top``: the loop around ``screen``."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings
from moonpool.cli.running import find

if TYPE_CHECKING:
    from moonpool.cluster.overview.picture import Look, Picture
    from moonpool.cluster.overview.poll import Poller

LEAST_S, MOST_S = 0.2, 3_600.0
PATIENCE_S = 30.0  # a registry that does not answer for so long ends it; the last picture stays until then


def top(
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    interval: Annotated[float, typer.Option("--interval", "-i", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, over one interval.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pools, workers, carriers, hits, refusals and latencies, live. q ends it.

    Where standard output is no terminal, frames are printed one after the other; with --json one line each.
    """
    from moonpool.core.errors import InvalidRequest

    if not LEAST_S <= interval <= MOST_S:
        raise InvalidRequest(f"--interval: {interval} s; use {LEAST_S} to {MOST_S:.0f}", param="interval")
    running = find(name, config_file, settings)
    asyncio.run(_run(running.registry, running.config.cluster.name, interval, once, as_json))


async def _run(registry: str, name: str, interval: float, once: bool, as_json: bool) -> None:
    from moonpool.cluster.overview.poll import Poller

    quit = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, quit.set)
    poller = Poller()
    try:
        with ExitStack() as stack:
            show = _shower(stack, name, quit, live=not once and not as_json and sys.stdout.isatty(), as_json=as_json)
            await _watch(poller, registry, interval, once, quit, show)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the frames has seen enough
    finally:
        await poller.close()


def _shower(stack: ExitStack, name: str, quit: asyncio.Event, *, live: bool, as_json: bool) -> Callable[[Picture], None]:
    """Where frames go: the whole terminal until the end, or standard output."""
    from rich.console import Console, Group
    from rich.live import Live

    from moonpool.cli.top.keys import quit_key
    from moonpool.cli.top.screen import screen

    if as_json:
        return lambda picture: print(json.dumps(_told(picture)), flush=True)
    if not live:
        return lambda picture: print(
            *(line.plain for line in screen(picture, name, get_terminal_size().columns, 0)), "", sep="\n", flush=True
        )
    console = Console()
    stack.enter_context(quit_key(quit))
    display = stack.enter_context(Live(console=console, screen=True, auto_refresh=False, transient=True))
    return lambda picture: display.update(Group(*screen(picture, name, *console.size)), refresh=True)


def _told(picture: Picture) -> dict[str, object]:
    return {**asdict(picture), "live": picture.live, "hit_share": picture.hit_share}


async def _watch(
    poller: Poller, registry: str, interval: float, once: bool, quit: asyncio.Event, show: Callable[[Picture], None]
) -> None:
    from moonpool.cluster.overview.picture import picture

    before = await _look(poller, registry)
    if not once:
        show(picture(None, before))
    silent_s = 0.0
    while not await _over(quit, interval):
        look = await _try_to_look(poller, registry, silent_s)
        silent_s = 0.0 if look is not None else silent_s + interval
        if look is None:
            continue
        show(picture(before, look))
        before = look
        if once:
            return


async def _try_to_look(poller: Poller, registry: str, silent_s: float) -> Look | None:
    """None while the registry is away for a moment. NoPath once it is away for good."""
    from moonpool.core.errors import NoPath

    try:
        return await _look(poller, registry)
    except NoPath:
        if silent_s > PATIENCE_S:
            raise
        return None  # the last picture stays


async def _look(poller: Poller, registry: str) -> Look:
    from moonpool.cluster.overview.picture import Look
    from moonpool.cluster.survey import members

    answers = await poller.look(await members(registry))
    return Look(asyncio.get_running_loop().time(), tuple(answers))


async def _over(quit: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await quit.wait()
    except TimeoutError:
        return False
    return True
