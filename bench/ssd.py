"""The SSD tier against fio: 1 MB blocks, direct I/O, the same file system, queue depth and run, taking turns.

The tier checks every block's digests before it writes it and after it has read it; fio moves bytes only. fio uses one
buffer per thread again and again, which stays in the processor's cache; so does the tier where it is compared. The
``cold`` figures are the tier's with memory that is not in any cache, as the slots of a large pool are.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.bench.machine import machine_facts
from moonpool.core.config import MIB, StoreConfig
from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Write
from moonpool.kvstore.ssd.tier import SsdTier

LAYOUT = KVLayout("bench", layers=16, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=64)  # 1 MiB blocks
THREADS = 4
BATCH = 24  # blocks of one call of the tier where memory is cold, and of one write; two calls are in flight
HOT = 4  # buffers of each of the two where they stay in cache
TURNS = ("write", "fio_write", "write_cold", "read", "fio_read", "read_cold")


@dataclass(frozen=True)
class SsdOptions:
    path: str
    seconds: float = 24.0  # of measuring, all turns together
    rounds: int = 8
    file_bytes: int = 1024 * MIB  # of the tier, and of fio's file


def ssd(options: SsdOptions) -> dict[str, Any]:
    """Rates in GB/s; figures with ``vs`` are medians of the ratios of neighbouring turns, or None."""
    folder = Path(options.path)
    if not folder.is_dir():
        raise InvalidRequest(f"--path: {folder} is no folder; name one on the disk to be measured", param="path")
    with tempfile.TemporaryDirectory(dir=folder, prefix="moonpool-ssd-") as scratch:
        return asyncio.run(_measure(options, Path(scratch)))


async def _measure(options: SsdOptions, scratch: Path) -> dict[str, Any]:
    config = StoreConfig(ssd_path=str(scratch), ssd_bytes=options.file_bytes, ssd_threads=THREADS)
    tier = await SsdTier.open(config, NodeId("bench"), [LAYOUT])
    fio = _fio_version()
    turns = [name for name in TURNS if fio or not name.startswith("fio")]
    seconds = options.seconds / (len(turns) * options.rounds)
    rates: dict[str, list[float]] = {name: [] for name in TURNS}
    try:
        side = _Tier(tier)
        await side.fill()
        if fio:
            _fio(scratch, "write", options.file_bytes, None)
        for _ in range(options.rounds):
            for name in turns:
                kind = name.removeprefix("fio_")
                if name.startswith("fio"):
                    rates[name].append(await asyncio.to_thread(_fio, scratch, kind, options.file_bytes, seconds))
                else:
                    rates[name].append(await side.turn(name, seconds))
        direct = tier.numbers()["ssd_bytes_read_direct"] > 0
    finally:
        await tier.close()
    return {
        "write_vs_fio": _ratio(rates["write"], rates["fio_write"]),
        "read_vs_fio": _ratio(rates["read"], rates["fio_read"]),
        "write_cold_vs_fio": _ratio(rates["write_cold"], rates["fio_write"]),
        "read_cold_vs_fio": _ratio(rates["read_cold"], rates["fio_read"]),
        **({} if fio else {"reason": "fio is not installed (Debian: apt install fio), so there is nothing to compare with"}),
        **{f"{name}_gbs": statistics.median(values) / 1e9 if values else None for name, values in rates.items()},
        "rounds": {name: [round(rate / 1e9, 3) for rate in values] for name, values in rates.items()},
        "block_bytes": LAYOUT.block_bytes,
        "queue_depth": THREADS,
        "file_bytes": options.file_bytes,
        "direct": direct,
        "fio": fio,
        "machine": machine_facts(),
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None


class _Tier:
    """Writes and reads whole batches, two at a time, as a pool under pressure does."""

    def __init__(self, tier: SsdTier) -> None:
        self._tier = tier
        self._lanes = {hot: [Lane(2 * hot, hot), Lane(2 * hot + 1, hot)] for hot in (False, True)}
        self._held: list[tuple[int, bytes]] = []  # (extent, key) of each block on the tier, oldest first

    async def fill(self) -> None:
        """Every extent written once: new files are slower, and fio's are laid out before it is measured."""
        while self._tier.room(LAYOUT) >= BATCH:
            await self._write(self._lanes[False][0])

    async def turn(self, name: str, seconds: float) -> float:
        """Bytes per second of blocks."""
        step = self._write if name.startswith("write") else self._read
        begun = time.perf_counter()
        done = 0

        async def go(lane: Lane) -> None:
            nonlocal done
            while time.perf_counter() - begun < seconds:
                blocks = await step(lane)
                done += blocks

        await asyncio.gather(*(go(lane) for lane in self._lanes[not name.endswith("cold")]))
        return done * LAYOUT.block_bytes / (time.perf_counter() - begun)

    async def _write(self, lane: Lane) -> int:
        while self._tier.room(LAYOUT) < BATCH:
            oldest, self._held = self._held[:BATCH], self._held[BATCH:]
            self._tier.free([extent for extent, _ in oldest])
        extents = await self._tier.write(lane.writes)
        written = [(extent, w.key) for extent, w in zip(extents, lane.writes, strict=True) if extent is not None]
        self._held += written
        return len(written)

    async def _read(self, lane: Lane) -> int:
        n = len(lane.into)
        at = lane.next(len(self._held) // n) * n
        reads = [
            Read(extent, key, LAYOUT, slot) for (extent, key), slot in zip(self._held[at : at + n], lane.into, strict=True)
        ]
        return (await self._tier.read(reads, 60.0)).count(ReadEnd.OK)


class Lane:
    """One of two callers: what it writes, and slots to read into, touched before anything is measured."""

    def __init__(self, number: int, hot: bool) -> None:
        count = HOT if hot else BATCH
        self.writes = ([self._block(number * BATCH + i, slot) for i, slot in enumerate(_slots(count))] * BATCH)[:BATCH]
        self.into = _slots(count)
        self._at = number

    def next(self, of: int) -> int:
        self._at += 2
        return self._at % of

    def _block(self, n: int, slot: NDArray[np.uint8]) -> Write:
        key = n.to_bytes(16, "big")
        content = np.random.default_rng(n).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)
        slices.fill(LAYOUT, slot, 0, key, content)
        return Write(key, None, LAYOUT, Use(), slot)


def _slots(n: int) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(mmap.mmap(-1, n * LAYOUT.slot_bytes), dtype=np.uint8)
    whole[:] = 1
    return [whole[i * LAYOUT.slot_bytes : (i + 1) * LAYOUT.slot_bytes] for i in range(n)]


def _fio_version() -> str | None:
    if shutil.which("fio") is None:
        return None
    return subprocess.run(("fio", "--version"), capture_output=True, text=True, check=True).stdout.strip()


def _fio(folder: Path, kind: str, size: int, seconds: float | None) -> float:
    """Bytes per second. ``seconds`` None: once over the file."""
    part = size // THREADS
    command = [
        "fio",
        f"--name={kind}",
        f"--rw={kind}",
        f"--filename={folder / 'fio'}",
        f"--size={part}",
        f"--offset_increment={part}",
        "--bs=1M",
        "--direct=1",
        "--ioengine=psync",
        f"--numjobs={THREADS}",
        "--thread",
        "--group_reporting",
        "--output-format=json",
    ]
    if seconds is not None:
        command += ["--time_based", f"--runtime={max(1, round(1000 * seconds))}ms"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])
