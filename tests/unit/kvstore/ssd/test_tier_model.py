"""Random writes, frees, erasures, moves, cuts and bad bytes against a dict: never a wrong byte, no space lost."""

from __future__ import annotations

import asyncio
import errno
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given, settings
from support.ssd import OTHER, SMALL, Faulty, Short, flip, key, right, tier, writes

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.format import HEADER_BYTES, capacity, extent_bytes
from moonpool.kvstore.ssd.tier import SsdTier

CAP = 8 * 128 * 1024  # ten small or three other blocks per segment
LAYOUTS = (SMALL, OTHER)
Held = dict[tuple[KVLayout, int], int]  # (layout, number) -> extent

steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "free", "erase", "compact", "restart", "cut", "flip"]),
        st.sampled_from(LAYOUTS),
        st.integers(0, 1 << 30),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_no_wrong_byte_and_no_lost_space_whatever_happens(steps: list[tuple[str, KVLayout, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_Model(Path(folder)).run(steps))


class _Model:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: Held = {}
        self.erased: set[tuple[KVLayout, int]] = set()
        self.bad: set[tuple[KVLayout, int]] = set()  # a byte of theirs was changed
        self.io = Faulty()

    async def run(self, steps: Sequence[tuple[str, KVLayout, int]]) -> None:
        await self.open()
        for what, layout, seed in steps:
            await getattr(self, what)(layout, random.Random(seed))
            await self.agree()
        await self.restart(SMALL, random.Random(0))
        await self.all_space()
        await self.of.close()

    async def open(self) -> None:
        self.io = Faulty()
        self.of: SsdTier = await tier(self.folder, *LAYOUTS, io=self.io, ssd_bytes=CAP)
        self.of.on_lost, self.of.on_moved = self.lost, self.moved

    def lost(self, extents: Sequence[int]) -> None:
        self.held = {block: e for block, e in self.held.items() if e not in set(extents)}

    def moved(self, moved: Mapping[int, int]) -> None:
        self.held = {block: moved.get(e, e) for block, e in self.held.items()}

    async def agree(self) -> None:
        await self.of.quiet()
        assert self.of.numbers()["ssd_extents"] == len(self.held)

    def some(self, layout: KVLayout, rng: random.Random) -> dict[int, int]:
        mine = {n: e for (of, n), e in self.held.items() if of == layout}
        return dict(rng.sample(sorted(mine.items()), rng.randint(0, len(mine))))

    async def write(self, layout: KVLayout, rng: random.Random) -> None:
        names = [n for n in rng.sample(range(60), rng.randint(1, 25)) if (layout, n) not in self.held]
        self.erased -= {(layout, n) for n in names}  # a write that fails may still be found whole later
        for n, extent in zip(names, await self.of.write(writes(layout, names)), strict=True):
            if extent is not None:
                self.held[layout, n] = extent
                self.bad.discard((layout, n))

    async def read(self, layout: KVLayout, rng: random.Random) -> None:
        some = self.some(layout, rng)
        bad = {n for n in some if (layout, n) in self.bad}
        assert await right(self.of, layout, some) == set(some) - bad

    async def free(self, layout: KVLayout, rng: random.Random) -> None:
        some = self.some(layout, rng)
        self.of.free(some.values())
        for n in some:
            del self.held[layout, n]

    async def erase(self, layout: KVLayout, rng: random.Random) -> None:
        some = self.some(layout, rng)
        await self.of.erase([self.held.pop((layout, n)) for n in some])
        self.erased |= {(layout, n) for n in some}

    async def compact(self, layout: KVLayout, rng: random.Random) -> None:
        before = self.of.room(layout)
        assert await self.of.compact(layout) == max(0, self.of.room(layout) - before)

    async def flip(self, layout: KVLayout, rng: random.Random) -> None:
        for n, extent in self.some(layout, rng).items():
            flip(self.folder, layout, extent, rng.randrange(HEADER_BYTES + layout.block_bytes))
            self.bad.add((layout, n))

    async def cut(self, layout: KVLayout, rng: random.Random) -> None:
        """The process ends inside a write or a move: some pages of it are on the disk, nothing after them is."""
        after = rng.randint(0, 6)
        pages = rng.randint(0, 20)
        count = 0

        def ask(fd: int, n: int, size: int, offset: int) -> int | Short | None:
            nonlocal count
            count += 1
            return None if count <= after else Short(pages * HEADER_BYTES) if count == after + 1 else errno.EIO

        self.io.write = ask
        await getattr(self, rng.choice(["write", "compact"]))(layout, rng)
        await self.restart(layout, rng)

    async def restart(self, layout: KVLayout, rng: random.Random) -> None:
        await self.of.close()
        before = self.held
        await self.open()
        names = {(of.fingerprint, key(n)): (of, n) for of in LAYOUTS for n in range(60)}
        found = {names[b.layout, b.key]: b.extent for b in self.of.recovered}
        assert len(found) == len(self.of.recovered)
        assert set(found) >= set(before) - self.bad, "a block that was written is not found"
        assert not set(found) & self.erased, "an erased block is found"
        unwanted = [block for block in found if block not in before]
        self.held = found
        for of in LAYOUTS:
            mine = {n: found[of, n] for of_, n in unwanted if of_ == of}
            await right(self.of, of, mine)
        self.of.free([self.held.pop(block) for block in unwanted if block in self.held])

    async def all_space(self) -> None:
        for layout in LAYOUTS:
            await right(self.of, layout, {n: e for (of, n), e in self.held.items() if of == layout})
        self.of.free(self.held.values())
        await self.of.quiet()
        segments = int(self.of.numbers()["ssd_segments"])
        assert segments == 8
        for layout in LAYOUTS:
            assert self.of.room(layout) == segments * capacity(CAP // 8, layout)
            assert capacity(CAP // 8, layout) == (CAP // 8 - HEADER_BYTES) // extent_bytes(layout)
