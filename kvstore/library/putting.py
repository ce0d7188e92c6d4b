"""Putting blocks through a host link: reserve, fill through the mapping, seal, with the next batch's room asked for meanwhile.

Several batches are on their way at once, so that the store node decides on one core while this process copies on another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from moonpool.core.errors import InvalidRequest, TransferFailed
from moonpool.kvstore.library.chunks import Fill, fill
from moonpool.kvstore.library.host_link import HostLink
from moonpool.kvstore.library.items import Item, Put
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Granted, Kind, Link

BATCH_BLOCKS = 256
BATCH_BYTES = 64 << 20
FIRST = 4  # items asked for in the first message of a call
GROWTH = 4  # how many times as many items the next message is about, up to a limit
AHEAD = 2  # messages on their way


OF_STATE = (Put.STORED, Put.THERE, Put.COMING, Put.NO_ROOM, Put.NO_PARENT)  # by place in frames.STATES


@dataclass(slots=True)
class Batch:
    items: list[Item]
    ids: list[int] = field(default_factory=list)


def portions(n: int, most: int) -> Iterator[range]:
    """0 to ``n`` in parts that grow up to ``most``: the first answer comes soon, and few messages are needed."""
    at, size = 0, FIRST
    while at < n:
        yield range(at, min(at + size, n))
        at += size
        size = min(GROWTH * size, most)


def batches(items: Iterable[Item]) -> Iterator[Batch]:
    """Items in order, as many at a time as keep a frame and the slots reserved ahead small; the first ones are small."""
    most = FIRST
    out: list[Item] = []
    blocks = size = 0
    for item in items:
        if out and (blocks + len(item.wanted) > most or size + item.bytes > BATCH_BYTES):
            yield Batch(out)
            most = min(GROWTH * most, BATCH_BLOCKS)
            out, blocks, size = [], 0, 0
        out.append(item)
        blocks += len(item.wanted)
        size += item.bytes
    if out:
        yield Batch(out)


class Putting:
    """One call's puts over ``link``. An error ends the link, and the store node gives back what was begun.

    ``parent`` is the block that items with ``Link.PARENT`` follow.
    """

    def __init__(self, link: HostLink, parent: bytes | None = None) -> None:
        self._link = link
        self._parent = parent
        self._last = b""  # the last block asked for: what the next frame's first one may follow
        self._asked: deque[tuple[Kind, Batch]] = deque()
        self._items: list[Item] = []
        self._refused: InvalidRequest | None = None  # what the caller's next item could not be made for

    def run(self, items: Iterable[Item]) -> list[Put]:
        """What became of each item; what is STORED can be found by others.

        Items are made as they are asked for. InvalidRequest of that ends the call when all before it are through.
        """
        try:
            self._run(items)
        except BaseException:
            self._link.close()
            raise
        if self._refused is not None:
            raise self._refused
        return [item.put for item in self._items]

    def _run(self, items: Iterable[Item]) -> None:
        todo = batches(self._made(items))
        for _ in range(AHEAD):
            self._reserve(todo)
        while self._asked:
            kind, batch = self._asked.popleft()
            head, frame = self._link.receive()
            if head.kind is not kind:
                raise TransferFailed(f"the store node answered {head.kind.name} where {kind.name} was asked")
            if kind is Kind.RESERVE:
                granted = frames.decode_granted(frame, head.items)
                self._reserve(todo)
                self._fill(batch, granted)
            else:
                self._sealed(batch, frames.decode_bits(frame, head.items))

    def _made(self, items: Iterable[Item]) -> Iterator[Item]:
        try:
            for item in items:
                self._items.append(item)
                yield item
        except InvalidRequest as e:
            self._refused = e

    def _reserve(self, todo: Iterator[Batch]) -> None:
        batch = next(todo, None)
        if batch is None:
            return
        wanted = [one for item in batch.items for one in item.wanted]
        parent = self._parent
        if wanted[0].link is Link.BEFORE:
            wanted[0], parent = wanted[0]._replace(link=Link.PARENT), self._last
        self._last = wanted[-1].key
        self._link.send(frames.encode_reserve(self._link.number(), parent, wanted))
        self._asked.append((Kind.RESERVE, batch))

    def _fill(self, batch: Batch, granted: Sequence[Granted]) -> None:
        if len(granted) != sum(len(item.wanted) for item in batch.items):
            raise TransferFailed("the store node answered for other blocks than were asked for")
        fills: list[Fill] = []
        ids, memory, answers = batch.ids, self._link.memory, iter(granted)
        for item in batch.items:
            mine = list(islice(answers, len(item.wanted)))
            item.put = put = OF_STATE[mine[-1].state]
            if put is Put.STORED:
                for i, one in enumerate(mine):
                    fills += item.fills(i, memory(one.region, one.offset, item.slot_bytes(i)), one.offset)
                    ids.append(one.id)
        fill(fills)
        if batch.ids:
            self._link.send(frames.encode_ids(Kind.SEAL, self._link.number(), batch.ids))
            self._asked.append((Kind.SEAL, batch))

    def _sealed(self, batch: Batch, found: bytes) -> None:
        if len(found) != len(batch.ids):
            raise TransferFailed("the store node sealed other blocks than were filled")
        at = 0
        for item in batch.items:
            if item.put is Put.STORED:
                at += len(item.wanted)
                item.put = Put.STORED if found[at - 1] else Put.LOST
