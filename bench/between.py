"""``moonpool bench between``: a working set from one store node to another, every byte checked at its end.

Two store nodes in processes of their own, each with a reader beside it. The first is filled with blocks whose bytes follow
from their keys; the second then fetches them all through the carrier, and its reader copies every slice out, checks it
against its digest and compares it with what the key says. Keys: ``carrier`` (asked for), ``carriers_used`` (what moved the
bytes, by the sender's words), ``bytes``, ``blocks``, ``blocks_wrong`` and ``blocks_missing`` (both 0), ``fetch_gb_s``,
``machine``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moonpool.bench.machine import machine_facts
from moonpool.cluster.registry import Registry
from moonpool.core.config import MIB, TimingConfig
from moonpool.core.errors import ConfigError

CARRIERS = ("auto", "tcp", "ucx", "ucxx")
START_S = 120.0


@dataclass(frozen=True, slots=True)
class BetweenOptions:
    carrier: str = "tcp"
    total_bytes: int = 2 << 30

    def check(self) -> None:
        if self.carrier not in CARRIERS:
            raise ConfigError(f"carrier: {self.carrier!r} does not join two nodes; use one of {CARRIERS}", param="carrier")
        if self.total_bytes < 16 * MIB:
            raise ConfigError(f"bytes: {self.total_bytes} is too little to say anything; use 16MiB or more", param="bytes")


def between(options: BetweenOptions, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a side that does not start."""
    options.check()
    machine = machine_facts()
    return {**asyncio.run(_between(options, say)), "machine": machine}


async def _between(options: BetweenOptions, say: Callable[[str], None]) -> dict[str, Any]:
    registry = Registry(TimingConfig())
    address = await registry.start("127.0.0.1")
    try:
        with tempfile.TemporaryDirectory(prefix="moonpool-between-") as folder:
            given = {"registry": address, "carrier": options.carrier, "bytes": options.total_bytes, "folder": folder}
            async with _side({**given, "node": "a"}) as here, _side({**given, "node": "b"}) as there:
                filled = await here.do(do="fill")
                say(f"filled {filled['blocks']} blocks, {filled['bytes'] / 1e9:.2f} GB")
                fetched = await there.do(do="fetch", source="a", blocks=filled["blocks"])
                say(f"fetched in {fetched['seconds']:.2f} s; checking")
                checked = await there.do(do="check", blocks=filled["blocks"])
                used = (await here.do(do="words"))["carriers_sent"]
    finally:
        await registry.close()
    return {
        "carrier": options.carrier,
        "carriers_used": used,
        "bytes": filled["bytes"],
        "blocks": filled["blocks"],
        "blocks_missing": checked["missing"],
        "blocks_wrong": checked["wrong"],
        "fetch_gb_s": filled["bytes"] / fetched["seconds"] / 1e9,
    }


class _Side:
    """A child process that answers one JSON line to each line it is sent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise ConfigError("bench: a store node ended; its reason is above", param="bench")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def _side(given: dict[str, Any]) -> AsyncIterator[_Side]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonpool.bench.between_child", json.dumps(given),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
    )  # fmt: skip
    side = _Side(process)
    try:
        async with asyncio.timeout(START_S):
            await side.do(do="words")
        yield side
    except TimeoutError as e:
        raise ConfigError(f"bench: a store node did not start within {START_S:.0f} s", param="bench") from e
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30.0)
        except TimeoutError:
            process.kill()
            await process.wait()


def _environment() -> dict[str, str]:
    """Two node ids on one machine: UCX has to go over TCP, through the loopback."""
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib", **os.environ}
