"""Landed slices: announced by notices, verified in threads, told to their reader."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.landing import Landed, PushNotice
from moonpool.core.layout import KVLayout
from moonpool.kvstore import slices
from moonpool.kvstore.claims import Expected, LandingClaim
from moonpool.kvstore.pool import Pool
from moonpool.wire.frames import decode_notice

PENDING = 1 << 16  # slices that may wait for verification; more are dropped, and pushed again by their writers
ON_LOOP_BYTES = 32 << 10  # larger frames are decoded in a thread
WRITERS = 1_024  # that are told apart in ``landed_from``
PLACE = "landing"


class Verifier:
    """Event-loop only. ``on_landed(reader, landed)`` after slices were accepted; ``changed()`` after the pool was."""

    def __init__(
        self,
        pool: Pool,
        views: Sequence[NDArray[np.uint8]],
        clock: Callable[[], float],
        on_landed: Callable[[int | None, Landed], None],
        changed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._views = views
        self._clock = clock
        self._on_landed = on_landed
        self._changed = changed
        self._threads = ThreadPoolExecutor(2, "store verify")
        self._pulse = asyncio.Event()
        self.pending = 0
        self.bytes_landed: Counter[str] = Counter()  # by carrier
        self.landed_from: Counter[tuple[str, str]] = Counter()  # by (member that pushed, carrier)

    async def take(self, frame: bytes, carrier: str) -> None:
        """Returns when every slice that the notice announces is verified, or known to need no verification."""
        loop = asyncio.get_running_loop()
        try:
            if len(frame) <= ON_LOOP_BYTES:
                notice = decode_notice(frame)
            else:
                notice = await loop.run_in_executor(self._threads, decode_notice, frame)
            layout, expected = self._pool.landings.expected(notice)
        except InvalidRequest:
            self._pool.held.counted["notices_malformed"] += 1
            raise
        if layout is None or not expected:
            return
        if self.pending + len(expected) > PENDING:
            self._pool.held.counted["notices_dropped"] += 1
            return
        self.pending += len(expected)
        try:
            right = await loop.run_in_executor(self._threads, self._check, layout, expected, notice.layer)
        finally:
            self.pending -= len(expected)
        self._settle(notice, layout, expected, right, carrier)

    def _check(self, layout: KVLayout, expected: list[Expected], layer: int) -> list[bool]:
        return [
            slices.is_right(layout, self._views[e.ref.region], e.ref.offset, layer, e.ref.key, e.valid, e.digest)
            for e in expected
        ]

    def _settle(self, notice: PushNotice, layout: KVLayout, expected: list[Expected], right: list[bool], carrier: str) -> None:
        landings = self._pool.landings
        claim = landings.get(notice.landing)
        reader = None if claim is None else claim.ask.reader
        now = self._clock()
        landed, blocks = 0, []
        for one, ok in zip(expected, right, strict=True):
            if not ok:
                self._pool.held.mismatch(PLACE)
                landings.rejected(notice.landing, one.slot, notice.layer)
            elif landings.misses(notice.landing, one.slot, notice.layer):
                # Here and not in the thread: the slot may have changed hands while its bytes were being read.
                view = self._views[one.ref.region]
                slices.mark(layout, view, one.ref.offset, notice.layer, one.valid, one.digest)
                landings.landed(notice.landing, one.slot, notice.layer, now)
                blocks.append(one.block)
                landed += sum(length for _, length in layout.pieces(one.valid))
        if blocks:
            self._count(claim, carrier, landed)
            self._on_landed(
                reader,
                Landed(notice.landing, notice.request, notice.attempt, notice.chunk, notice.layer, tuple(blocks)),
            )
        self.pulse()
        self._changed()

    def _count(self, claim: LandingClaim | None, carrier: str, landed: int) -> None:
        self.bytes_landed[carrier] += landed
        pushed = ("" if claim is None else claim.ask.writer.member, carrier)
        if len(self.landed_from) < WRITERS or pushed in self.landed_from:
            self.landed_from[pushed] += landed

    def landed_word(self) -> str:
        """``landed_from`` as one of the node's words: ``prefill-0/ucx=1024 store-a/tcp=512``."""
        return " ".join(f"{writer}/{carrier}={count}" for (writer, carrier), count in sorted(self.landed_from.items()))

    def pulse(self) -> None:
        """Wake whoever waits for a landing to settle."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def settled(self, landing: int, wait_s: float) -> None:
        """Until nothing more is to be expected of ``landing`` for now, or ``wait_s`` is over."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._pool.landings.settled(landing):
                    await self._pulse.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
