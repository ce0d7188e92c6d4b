"""Bytes per second with and without KV encryption: a push over tcp, the SSD tier, a folder of the shared tier."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from moonpool.bench.ssd import BATCH, LAYOUT, Lane
from moonpool.core.config import MIB, StoreConfig, TransferConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.sealing.keys import KvKeys
from moonpool.kvstore.shared_tier.tier import SharedRead, SharedTier
from moonpool.kvstore.ssd.blocks import Read
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.kvstore.transfer.carrier import LENGTH, OFFSET, TARGET
from moonpool.kvstore.transfer.tcp_receiver import TcpReceiver
from moonpool.kvstore.transfer.tcp_sender import TcpSender

SLICE = 64 << 10
PUSH = 16  # slices of one push, not side by side: nothing is joined
MEMORY = 64 * MIB
DEADLINE_S = 60.0


def _member(name: str) -> Member:
    return Member(MemberId(name), Role.STORE, NodeId(name), Incarnation(1), "127.0.0.1:1", 1)


class Pushing:
    turns: ClassVar[tuple[str, ...]] = ("carrier_push",)

    def __init__(self, keys: KvKeys | None) -> None:
        key = None if keys is None else keys.current
        self._receiver = TcpReceiver(_member("b"), lambda frames: None, key=key)
        self._receiver.register([Region(0, "", MEMORY, SLICE)], [np.zeros(MEMORY, np.uint8)])
        self._sender = TcpSender(_member("a"), TransferConfig(), key=key)
        self._sender.register([np.full(MEMORY, 7, np.uint8)])
        self._at = 0

    @classmethod
    async def open(cls, folder: Path, keys: KvKeys | None) -> Pushing:
        return cls(keys)

    async def turn(self, name: str, seconds: float) -> float:
        target, begun, done = self._receiver.describe(), time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            pushes = [asyncio.wrap_future(self._sender.push(target, self._pieces(), b"n" * 600)) for _ in range(8)]
            await asyncio.gather(*pushes)
            done += len(pushes) * PUSH * SLICE
        return done / (time.perf_counter() - begun)

    def _pieces(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The next slices, every other one of the memory."""
        pieces = np.zeros((PUSH, 5), dtype=np.int64)
        pieces[:, OFFSET] = pieces[:, TARGET] = (self._at + 2 * SLICE * np.arange(PUSH)) % MEMORY
        pieces[:, LENGTH] = SLICE
        self._at = (self._at + 2 * SLICE * PUSH) % MEMORY
        return pieces

    async def close(self) -> None:
        await asyncio.to_thread(self._sender.close)
        await asyncio.to_thread(self._receiver.close)


class Ssd:
    turns: ClassVar[tuple[str, ...]] = ("ssd_write", "ssd_read")

    def __init__(self, tier: SsdTier) -> None:
        self._tier = tier
        self._lane = Lane(0, hot=False)
        self._held: list[int] = []

    @classmethod
    async def open(cls, folder: Path, keys: KvKeys | None) -> Ssd:
        config = StoreConfig(ssd_path=str(folder), ssd_bytes=256 * MIB)
        return cls(await SsdTier.open(config, NodeId("bench"), [LAYOUT], keys=keys))

    async def turn(self, name: str, seconds: float) -> float:
        step = self._write if name == "ssd_write" else self._read
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            await step()
            done += BATCH * LAYOUT.block_bytes
        return done / (time.perf_counter() - begun)

    async def _write(self) -> None:
        self._tier.free(self._held)
        self._held = [extent for extent in await self._tier.write(self._lane.writes) if extent is not None]

    async def _read(self) -> None:
        writes, slots = self._lane.writes, self._lane.into
        reads = [Read(e, w.key, LAYOUT, s) for e, w, s in zip(self._held, writes, slots, strict=True)]
        await self._tier.read(reads, DEADLINE_S)

    async def close(self) -> None:
        await self._tier.close()


class Shared:
    turns: ClassVar[tuple[str, ...]] = ("shared_write", "shared_read")

    def __init__(self, tier: SharedTier) -> None:
        self._tier = tier
        self._lane = Lane(0, hot=False)

    @classmethod
    async def open(cls, folder: Path, keys: KvKeys | None) -> Shared:
        folder.mkdir()
        return cls(await SharedTier.open(StoreConfig(shared_path=str(folder)), NodeId("bench"), keys=keys))

    async def turn(self, name: str, seconds: float) -> float:
        step = self._write if name == "shared_write" else self._read
        moved, spent = 0, 0.0
        while spent < seconds:
            spent += await step()
            moved += BATCH * LAYOUT.block_bytes
        return moved / spent

    async def _write(self) -> float:
        """Seconds of writing; what is there already would not be written again."""
        await self._tier.erase(LAYOUT, [write.key for write in self._lane.writes], DEADLINE_S)
        begun = time.perf_counter()
        await self._tier.write(self._lane.writes, DEADLINE_S)
        return time.perf_counter() - begun

    async def _read(self) -> float:
        pairs = zip(self._lane.writes, self._lane.into, strict=True)
        begun = time.perf_counter()
        await self._tier.read([SharedRead(write.key, LAYOUT, slot) for write, slot in pairs], DEADLINE_S)
        return time.perf_counter() - begun

    async def close(self) -> None:
        await self._tier.close()
