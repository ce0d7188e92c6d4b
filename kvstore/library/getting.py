"""Getting values and blocks through a host link: pin, copy out of the mapping, verify the private copy, unpin.

What fails its digest is quarantined at the store node and counts as not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.digests import slice_seed
from moonpool.core.errors import DigestMismatch, InvalidRequest, PeerSilent, TransferFailed
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore.library import values
from moonpool.kvstore.library.chunks import Parts, Read, header_of, read, read_chunk
from moonpool.kvstore.library.host_link import HostLink
from moonpool.kvstore.library.objects import CLASSES, SLOT_MORE, decode_header, plan, require_fits
from moonpool.kvstore.library.putting import AHEAD, portions
from moonpool.kvstore.library.values import Target
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import MAX_ITEMS, Kind, Place

PLACE = "library"  # where mismatches are counted
GET_AT_ONCE = 256  # values asked for in one message


def in_frames(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + MAX_ITEMS] for at in range(0, len(keys), MAX_ITEMS)]


def get_values(link: HostLink, keys: Sequence[bytes], into: Sequence[Target] | None, fetch_ms: int) -> list[Any]:
    """The value of each key, or None; copied into what ``into`` names for it, where that is given.

    The next portion is asked for before one is read, so that the store node finds it meanwhile. ``fetch_ms``: how long the
    node may take for what its host does not have in DRAM.
    """
    out: list[Any] = [None] * len(keys)
    asked: deque[range] = deque()
    try:
        _get(link, keys, into, fetch_ms, out, asked)
    except InvalidRequest:  # of the caller's: the connection is as good as before
        for _ in asked:
            head, frame = link.receive()
            _unpin(link, frames.decode_opened(frame, head.items)[0])
        raise
    return out


def _get(
    link: HostLink, keys: Sequence[bytes], into: Sequence[Target] | None, fetch_ms: int, out: list[Any], asked: deque[range]
) -> None:
    """``asked``: those whose answers are still to come."""
    todo = deque(portions(len(keys), GET_AT_ONCE))
    while todo or asked:
        while todo and len(asked) < AHEAD:
            asked.append(todo.popleft())
            part = keys[asked[-1].start : asked[-1].stop]
            link.send(frames.encode_keys(Kind.OPEN, link.number(), part, word=fetch_ms))
        mine = asked.popleft()
        head, frame = link.receive()
        ticket, opened = frames.decode_opened(frame, head.items)
        if not opened or len(opened) > len(mine):
            raise TransferFailed(f"the store node answered for {len(opened)} keys where {len(mine)} were asked for")
        if len(opened) < len(mine):  # the others did not fit into its answer
            todo.appendleft(mine[len(opened) :])
        try:
            _read_values(link, keys, mine, opened, into, out)
        finally:
            _unpin(link, ticket)


def _read_values(
    link: HostLink,
    keys: Sequence[bytes],
    which: range,
    opened: Sequence[Sequence[Place]],
    into: Sequence[Target] | None,
    out: list[Any],
) -> None:
    """Into ``out`` at each place of ``which`` whose value is here and right."""
    found = [
        (i, Value(link, keys[i], places, None if into is None else into[i]))
        for i, places in zip(which, opened, strict=False)
        if places
    ]
    right = iter(read([one for _, value in found for one in value.reads]))
    for i, value in found:
        value.sound &= sum(islice(right, len(value.reads))) == len(value.reads)
        with suppress(DigestMismatch):
            out[i] = value.finish()
        if not value.sound:
            link.send(frames.encode_quarantine(0, keys[i], 0, PLACE))


def get_blocks(link: HostLink, layout: KVLayout, number: int, keys: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> int:
    """How many leading blocks of ``layout`` (the node's ``number`` of it) were copied into ``into`` and are right."""
    done = 0
    for part in in_frames(keys):
        head, frame = link.ask(frames.encode_keys(Kind.PIN, link.number(), part, word=number))
        ticket, opened = frames.decode_opened(frame, head.items)
        places = [place for one in opened for place in one]
        try:
            each = zip(part, places, into[done:], strict=False)
            reads = [_block_reads(link, layout, key, place, target) for key, place, target in each]
            right = read([one for block in reads for one in block])
        finally:
            _unpin(link, ticket)
        here = next((i for i, ok in enumerate(right) if not ok), len(right)) // layout.layers
        done += here
        if here < len(places):
            link.send(frames.encode_quarantine(0, keys[done], 0, PLACE))
        if here < len(part):
            break
    return done


def _unpin(link: HostLink, ticket: int) -> None:
    if ticket:
        with suppress(PeerSilent):  # then the pins went with the connection, and what was verified is right all the same
            link.send(frames.encode_ids(Kind.UNPIN, 0, [ticket]))


def _block_reads(link: HostLink, layout: KVLayout, key: bytes, place: Place, into: NDArray[np.uint8]) -> list[Read]:
    """Of each layer."""
    memory, size, out = link.memory(place.region, place.offset, layout.slot_bytes), layout.slice_bytes, []
    digests = place.offset + layout.block_bytes
    for layer in range(layout.layers):
        start, at = layer * size, digests + layer * DIGEST_BYTES
        copies = ((into.data[start : start + size], memory[place.offset + start : place.offset + start + size]),)
        digest = int.from_bytes(memory[at : at + DIGEST_BYTES], "little")
        out.append(Read(b"", copies, b"", slice_seed(key, layer), digest))
    return out


class Value:
    """A value whose chunks lie at ``places``: how it is read, and what it is then.

    Not ``sound``: its header is none, or is not of a value that lies there. InvalidRequest: ``into`` is of another size.
    """

    __slots__ = ("_into", "_raw", "_refused", "_shape", "reads", "sound")

    def __init__(self, link: HostLink, key: bytes, places: Sequence[Place], into: Target | None) -> None:
        leaf = places[-1]
        if leaf.layout >= len(CLASSES):
            raise InvalidRequest("key: it names a block of KV, not a value", param="key")
        need = CLASSES[leaf.layout] + SLOT_MORE
        memory = link.memory(leaf.region, leaf.offset, need)
        header = header_of(memory, leaf.offset)
        self.reads: list[Read] = []
        self.sound = True
        self._into = into
        self._refused = ""
        try:
            self._shape, nonce = decode_header(header)
            require_fits(self._shape, places)
        except DigestMismatch:
            self.sound = False
            return
        if into is not None:
            self._refused = into.refuses(self._shape)  # if it is such a value: that must be read first
        if into is None or self._refused:
            self._raw, views = values.make_room(self._shape)
        else:
            views = into.views
        parts = Parts(views)
        *before, last = plan(key, nonce, self._shape.size)
        for chunk, place in zip(before, places, strict=False):
            memory_of = link.memory(place.region, place.offset, need)
            self.reads.append(read_chunk(memory_of, place.offset, chunk, parts, None))
        self.reads.append(read_chunk(memory, leaf.offset, last, parts, header))

    def finish(self) -> Any:
        """Once ``reads`` are through: what the user gets. DigestMismatch, and no longer sound, where it is damaged."""
        if self.sound and self._refused:
            raise InvalidRequest(self._refused, param="into")
        try:
            if self.sound:
                return self._into.into if self._into is not None else values.finish(self._raw, self._shape)
        except DigestMismatch:
            self.sound = False
            raise
        raise DigestMismatch("the value is damaged")
