"""Getting values and blocks through a host link: pin, copy out of the mapping, verify the private copy, unpin.

What fails its digest is quarantined at the store node and counts as not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import DigestMismatch, InvalidRequest, PeerSilent, TransferFailed
from moonpool.core.layout import KVLayout
from moonpool.kvstore import chunks, slices, values
from moonpool.kvstore.host_link import HostLink
from moonpool.kvstore.objects import CLASSES, RAW_LAYOUTS, Shape, decode_header, plan, require_fits
from moonpool.kvstore.putting import AHEAD, portions
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import MAX_ITEMS, Kind, Place

PLACE = "library"  # where mismatches are counted
GET_AT_ONCE = 64  # values asked for in one message


def in_frames(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + MAX_ITEMS] for at in range(0, len(keys), MAX_ITEMS)]


def get_values(link: HostLink, keys: Sequence[bytes], into: Sequence[Any] | None) -> list[Any]:
    """The value of each key, or None; copied into what ``into`` names for it, where that is given.

    The next portion is asked for before one is read, so that the store node finds it meanwhile.
    """
    out: list[Any] = [None] * len(keys)
    todo = deque(portions(len(keys), GET_AT_ONCE))
    asked: deque[range] = deque()
    while todo or asked:
        while todo and len(asked) < AHEAD:
            asked.append(todo.popleft())
            part = keys[asked[-1].start : asked[-1].stop]
            link.send(frames.encode_keys(Kind.OPEN, link.number(), part))
        mine = asked.popleft()
        head, frame = link.receive()
        ticket, opened = frames.decode_opened(frame, head.items)
        if not opened or len(opened) > len(mine):
            raise TransferFailed(f"the store node answered for {len(opened)} keys where {len(mine)} were asked for")
        if len(opened) < len(mine):  # the others did not fit into its answer
            todo.appendleft(mine[len(opened) :])
        try:
            for i, places in zip(mine, opened, strict=False):
                if places:
                    out[i] = _read(link, keys[i], places, None if into is None else into[i])
        finally:
            _unpin(link, ticket)
    return out


def _read(link: HostLink, key: bytes, places: Sequence[Place], into: Any) -> Any:
    try:
        return _read_value(link, key, places, into)
    except DigestMismatch:
        link.send(frames.encode_quarantine(0, key, 0, PLACE))
        return None


def get_blocks(link: HostLink, layout: KVLayout, number: int, keys: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> int:
    """How many leading blocks of ``layout`` (the node's ``number`` of it) were copied into ``into`` and are right."""
    done = 0
    for part in in_frames(keys):
        head, frame = link.ask(frames.encode_keys(Kind.PIN, link.number(), part, word=number))
        ticket, opened = frames.decode_opened(frame, head.items)
        places = [place for one in opened for place in one]
        try:
            for place in places:
                _read_block(link, layout, keys[done], place, into[done])
                done += 1
        except DigestMismatch:
            link.send(frames.encode_quarantine(0, keys[done], 0, PLACE))
            break
        finally:
            _unpin(link, ticket)
        if len(places) < len(part):
            break
    return done


def _unpin(link: HostLink, ticket: int) -> None:
    if ticket:
        with suppress(PeerSilent):  # then the pins went with the connection, and what was verified is right all the same
            link.send(frames.encode_ids(Kind.UNPIN, 0, [ticket]))


def _read_block(link: HostLink, layout: KVLayout, key: bytes, place: Place, into: NDArray[np.uint8]) -> None:
    memory = link.memory(place.region, place.offset, layout.slot_bytes)
    region = np.frombuffer(memory, dtype=np.uint8)
    for layer in range(layout.layers):
        mine = slices.slice_of(layout, into, 0, layer)
        slices.read(layout, region, place.offset, layer, key, layout.block_tokens, mine)


def _read_value(link: HostLink, key: bytes, places: Sequence[Place], into: Any) -> Any:
    """The value whose chunks lie at ``places``, verified. DigestMismatch where they are not its."""
    leaf = places[-1]
    if leaf.layout >= len(RAW_LAYOUTS):
        raise InvalidRequest("key: it names a block of KV, not a value", param="key")
    memory = _memory(link, leaf)
    header = chunks.header_of(memory, leaf.offset, leaf.layout)
    shape, nonce = decode_header(header)
    require_fits(shape, places)
    if into is None:
        raw, views = values.make_room(shape)
    else:
        raw, views = into, values.targets(into)
        if sum(map(len, views)) != shape.size:
            _refuse(link, key, places, shape, sum(map(len, views)))
    parts = chunks.Parts(views)
    *before, last = plan(key, nonce, shape.size)
    for chunk, place in zip(before, places, strict=False):
        chunks.read(_memory(link, place), place.offset, chunk, parts, None)
    chunks.read(memory, leaf.offset, last, parts, header)
    return values.finish(raw, shape) if into is None else into


def _memory(link: HostLink, place: Place) -> memoryview:
    return link.memory(place.region, place.offset, CLASSES[place.layout] + chunks.TRAILER_BYTES)


def _refuse(link: HostLink, key: bytes, places: Sequence[Place], shape: Shape, size: int) -> NoReturn:
    """``into`` has ``size`` bytes. DigestMismatch where the value is damaged, InvalidRequest where it is right."""
    _read_value(link, key, places, values.make_room(shape)[0])
    raise InvalidRequest(f"into: {size} bytes for a value of {shape.size}", param="into")
