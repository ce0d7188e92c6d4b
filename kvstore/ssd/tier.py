"""The local SSD tier: blocks in large preallocated files, direct I/O, found again after a crash. Knows nothing of the pool.

Faults of the disk never raise into serving: a write that fails answers None, a read says late, torn or gone, and
``on_lost`` names extents that are no more. Whoever holds the pool reacts to that and to nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from moonpool.core.config import StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.kvstore.sealing.keys import KvKeys
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Recovered, Write
from moonpool.kvstore.ssd.compaction import Compactor
from moonpool.kvstore.ssd.erasing import Eraser
from moonpool.kvstore.ssd.files import Io
from moonpool.kvstore.ssd.flow import Flow, Kind, spare_threads
from moonpool.kvstore.ssd.opening import Opened, open_folder
from moonpool.kvstore.ssd.reading import Reader
from moonpool.kvstore.ssd.scan import Progress
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.writing import Writer

MOVE_BYTES_PER_S = 256e6  # of compaction, reads and writes together
CLOSE_S = 1.0  # what runs beside serving may take so long to end by itself
COUNTERS = (
    "blocks_written",
    "blocks_moved",
    *(f"reads_{end}" for end in ReadEnd),
    *(f"mismatches_{place}" for place in ("write", "read", "move", "start")),
    "verified_at_start",
    "orphans_at_start",
    "duplicates_at_start",
    "extents_lost",
    "extents_forgotten",
    "segments_formatted",
    "segments_compacted",
    "segments_lost",
    "read_errors",
    "write_errors",
    "writes_failed",
    "writes_unfit",
    "writes_without_room",
    "erase_failed",
)


def _silent(done: int, total: int) -> None:
    """Nobody watches the start."""


class SsdTier:
    """Event-loop only. ``on_lost(extents)`` and ``on_moved({from: to})`` are called on the loop, before the call that
    brought them about returns; both may name extents that their listener has not learned of yet, or freed just now.
    """

    def __init__(
        self,
        config: StoreConfig,
        opened: Opened,
        clock: Callable[[], float],
        wall: Callable[[], float],
        move_bytes_per_s: float,
        zeroise: bool = False,
    ) -> None:
        self.on_lost: Callable[[Sequence[int]], None] = lambda extents: None
        self.on_moved: Callable[[Mapping[int, int]], None] = lambda moved: None
        self.counted: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.counted.update(opened.scanned.counts)
        rates = {
            Kind.READ: config.ssd_read_bytes_per_s,
            Kind.WRITE: config.ssd_write_bytes_per_s,
            Kind.MOVE: move_bytes_per_s,
        }
        self._flow = Flow(config.ssd_threads, spare_threads(config.ssd_threads), rates, clock)
        self._sequence = itertools.count(opened.sequence)
        self._segments = Segments(opened, self._flow, self._next_sequence, wall, self.counted, self._lost)
        self._space = self._segments.space
        moving = asyncio.Lock()
        self._eraser = Eraser(self._segments, self._flow, self.counted, self._lost, moving, zeroise)
        self._eraser.forget(opened.scanned.torn)
        self._compactor = Compactor(
            self._segments, self._eraser, self._flow, self._next_sequence, self.counted, self._moved, moving
        )
        lacks_room = self._compactor.want
        threads = config.ssd_threads
        self._writer = Writer(self._segments, self._flow, threads, self._next_sequence, self.counted, lacks_room)
        self._reader = Reader(self._segments, self._eraser, self._flow, threads, clock, self.counted)
        self._strangers = dict(opened.scanned.kept)
        self.line = self._segments.line(sum(map(len, self._strangers.values())))  # for the screen
        self.recovered = [b for layout in self._space.known for b in self._strangers.pop(layout, ())]

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        node: NodeId,
        layouts: Sequence[KVLayout],
        *,
        io: Io | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        progress: Progress = _silent,
        move_bytes_per_s: float = MOVE_BYTES_PER_S,
        keys: KvKeys | None = None,
        zeroise: bool = False,
    ) -> SsdTier:
        """Locks the node's folder, allocates, and finds the blocks of an earlier life (``recovered``).

        ConfigError: the folder is in use by another process or cannot be written, others fill the file system, or a segment
        holds no block.
        With ``keys`` the files are encrypted; ``zeroise``: what is erased is overwritten. ``progress`` is called in another
        thread. ``clock`` times deadlines, ``wall`` dates layouts, both in seconds.
        """
        vault = None if keys is None else Vault(keys)
        opened = await asyncio.to_thread(open_folder, config, node, layouts, io or Io(), wall, progress, vault, zeroise)
        return cls(config, opened, clock, wall, move_bytes_per_s, zeroise)

    def register(self, layout: KVLayout) -> list[Recovered]:
        """Blocks of ``layout`` may be written and read from now on; returns those found at start, parents first."""
        if layout.fingerprint in self._space.known:
            return []
        self._segments.know(layout)
        found = self._strangers.pop(layout.fingerprint, [])
        return [block for block in found if self._space.find(block.extent, layout) is not None]

    def room(self, layout: KVLayout) -> int:
        """Extents that could be written now without freeing any."""
        return self._space.room(layout)

    async def write(self, blocks: Sequence[Write]) -> list[int | None]:
        """The extent of each block, or None: no room, or it could not be written. Parents before children, please."""
        for layout in {block.layout for block in blocks}:
            self.free(found.extent for found in self.register(layout))  # nobody asked for what is there
        return await self._writer.write(blocks)

    async def read(self, reads: Sequence[Read], deadline_s: float) -> list[ReadEnd]:
        """How each read ended. None is begun that would end later than ``deadline_s`` seconds from now.

        A read that a thread has begun is waited for, however late: the kernel may write its buffer until the call
        returns. So a request that must not wait for a stalled disk awaits this in a task of its own. Torn and
        unreadable extents are dropped, and named to ``on_lost`` before this returns. Cancelling gives up what is not
        begun, and is raised when the last buffer is out of reach of the kernel.
        """
        return await self._reader.read(reads, deadline_s)

    # -- freeing -----------------------------------------------------------------------------------------------------

    def free(self, extents: Iterable[int]) -> None:
        """Their space may be used again. Until it is, a restart may find the blocks once more."""
        self._segments.free(extents)

    async def erase(self, extents: Iterable[int]) -> None:
        """As ``free``, and no restart finds these blocks, nor any freed before: their headers are written over."""
        await self._eraser.erase(extents)

    async def erase_unknown(self) -> None:
        """Give up the blocks of layouts that nobody registered: what is cleared for everybody must not come back with one."""
        await self._eraser.erase_unknown()

    async def compact(self, layout: KVLayout) -> int:
        """Make room for ``layout`` by moving blocks of others together; returns the extents gained.

        ``write`` starts this by itself when it lacks room, and does not wait for it.
        """
        return await self._compactor.compact(layout)

    def numbers(self) -> dict[str, float]:
        """Gauges and counters for metrics; sizes in bytes."""
        flow = self._flow
        moved = {
            "ssd_bytes_read": flow.bytes[Kind.READ],
            "ssd_bytes_written": flow.bytes[Kind.WRITE],
            "ssd_bytes_compacted": flow.bytes[Kind.MOVE],
            "ssd_bytes_read_direct": flow.bytes[Kind.READ] if self._segments.direct else 0,
            "ssd_queue": flow.queued(),
        }
        counts = {f"ssd_{name}": value for name, value in (*self._space.counts().items(), *self.counted.items())}
        return {name: float(value) for name, value in (*moved.items(), *counts.items())}

    def words(self) -> dict[str, str]:
        """State in words, for operators."""
        return self._segments.words()

    async def quiet(self) -> None:
        """Until nothing runs beside serving: compaction, new files for lost ones, headers of torn blocks written over."""
        await self._segments.quiet()

    async def close(self) -> None:
        """Waits for what is under way. Everything written stays for the next start."""
        self._compactor.stop()
        await self._segments.quiet(CLOSE_S)
        await self._flow.close()
        await self._segments.quiet()
        self._segments.close()

    def _next_sequence(self) -> int:
        return next(self._sequence)  # called from the threads: one atomic step

    def _lost(self, extents: Sequence[int]) -> None:
        self.counted["extents_lost"] += len(extents)
        self.on_lost(extents)

    def _moved(self, moved: Mapping[int, int]) -> None:
        self.on_moved(moved)
