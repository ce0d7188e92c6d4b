"""Smaller copies of blocks, made on request, and full blocks made of them again for readers who may have such.

What decides is in the pool and in ``codecs``; here are the threads that check, encode and decode. A source's digests are
checked before it is encoded, and a copy's own before it is decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from moonpool.core.errors import DigestMismatch, InvalidRequest
from moonpool.core.landing import SlotRef
from moonpool.core.layout import RAW, KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.claims import Life, Reserved
from moonpool.kvstore.codecs.codec import Bytes, Codec, can_be_coded, coded, decode, encode
from moonpool.kvstore.codecs.copies import allows_lossy, copy_key, read_key
from moonpool.kvstore.codecs.make import make_codec
from moonpool.kvstore.control import Control
from moonpool.kvstore.rows import Entry

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

OURSELVES = 0  # the session number under which the node itself pins and writes
PLACE = "codec"
STEP = 16  # blocks that are encoded or decoded in one go, between two looks at the clock


@dataclass(frozen=True, slots=True)
class Compressed:
    """``made`` copies. ``kept`` full blocks stay beside theirs: they are in use, or others follow them."""

    made: int
    kept: int
    bytes_before: int  # of the full blocks that went
    bytes_after: int  # of the copies that were made


@dataclass(frozen=True, slots=True)
class _Job:
    """Fill ``target`` from ``source``, whose blocks have another layout."""

    source: SlotRef
    target: SlotRef
    reservation: int


Make = Callable[[Bytes], Bytes | None]


class Compressor:
    """Event-loop only. One order to compress at a time, and one part of the copies that readers wait for."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._control = Control(node.pool)
        self._compressing = asyncio.Lock()
        self._decoding = asyncio.Lock()
        self._made = 0
        self._decoded = 0

    def numbers(self) -> dict[str, float]:
        return {"lossy_copies_made": self._made, "lossy_copies_decoded": self._decoded}

    def allowed(self, layout: KVLayout, use: Use) -> bool:
        """Whether lossy copies of such blocks may serve ``use``."""
        node = self._node
        names = (node.config.model_name,) if layout.model == node.layout.model else ()
        return allows_lossy(node.config.store, layout, names, use)

    def learn(self, layout: KVLayout) -> None:
        """A layout is new here: copies of its blocks may lie on SSD already."""
        for codec in self._node.config.store.codecs if can_be_coded(layout) else ():
            self._node.pool.register(coded(layout, codec))

    # Making copies.

    async def compress(self, keys: Sequence[bytes], codec: str, dry_run: bool) -> Compressed:
        """A copy by ``codec`` of each leading block and of all that continues the last; then full ones that nobody uses go.

        Only blocks whose model or tenant allows it. InvalidRequest: the configuration does not allow the codec, or
        ``keys`` do not begin their sequence. Goes on if its caller gives up.
        """
        made = make_codec(codec)
        allowed = self._node.config.store.codecs
        if not made.lossy or codec not in allowed:
            raise InvalidRequest(
                f"codec: store.codecs of node {self._node.member.node} allows {', '.join(allowed) or 'none'}, not {codec!r}; "
                "add it there, and to store.lossy_for who may be served such copies",
                param="codec",
            )
        return await asyncio.shield(self._node.spawn(self._compress(keys, made, dry_run)))

    async def _compress(self, keys: Sequence[bytes], codec: Codec, dry_run: bool) -> Compressed:
        async with self._compressing:
            leading = list(takewhile(lambda key: self._can_have_copy(key, codec), keys))
            leading += self._control.after(leading[-1]) if leading else []
            todo = [entry for key in leading if not self._has_copy(key, codec) and (entry := self._source(key)) is not None]
            if todo and todo[0].parent is not None and not self._has_copy(todo[0].parent, codec):
                raise InvalidRequest(
                    f"keys: block {todo[0].key.hex()} follows one that has no copy; begin with the sequence's first block",
                    param="keys",
                )
            if dry_run:
                fresh = {entry.key for entry in todo}
                gone = self._control.drop([k for k in leading if k in fresh or self._has_copy(k, codec)], dry_run=True)
                after = sum(coded(entry.layout, codec.name).slot_bytes for entry in todo)
                return Compressed(len(todo), gone.kept, gone.bytes, after)
            made = after = 0
            for part in _parts(todo):
                done = await self._encode(part, codec)
                made += done
                after += done * coded(part[0].layout, codec.name).slot_bytes
            gone = self._control.drop([key for key in leading if self._has_copy(key, codec)], dry_run=False)
            self._made += made
            self._node.changed()
            return Compressed(made, gone.kept, gone.bytes, after)

    def _find(self, key: bytes) -> Entry | None:
        return self._node.pool.held.index.get(key)

    def _has_copy(self, key: bytes, codec: Codec) -> bool:
        return self._find(copy_key(key, codec.name)) is not None

    def _source(self, key: bytes) -> Entry | None:
        """A full block in DRAM, of somebody who takes lossy copies."""
        entry = self._find(key)
        return entry if entry is not None and entry.slot is not None and self.allowed(entry.layout, entry.use) else None

    def _can_have_copy(self, key: bytes, codec: Codec) -> bool:
        return self._has_copy(key, codec) or self._source(key) is not None

    async def _encode(self, part: Sequence[Entry], codec: Codec) -> int:
        """How many leading blocks of ``part``, which follow one another, got a copy: none where the block before has none."""
        first = part[0]
        if first.parent is not None and not self._has_copy(first.parent, codec):
            return 0
        small = coded(first.layout, codec.name)
        self._node.pool.register(small)
        parent = None if first.parent is None else copy_key(first.parent, codec.name)
        keys = [entry.key for entry in part]
        names = [copy_key(key, codec.name) for key in keys]
        return await self._make(keys, first.layout, names, small, parent, first.use, partial(encode, codec, first.layout))

    # Reading them.

    async def readable(self, keys: Sequence[bytes], use: Use, limit_s: float) -> Sequence[bytes]:
        """``keys``, where full blocks stand for those that only have a lossy copy: the names of blocks that may be pinned.

        Copies are decoded as far as ``limit_s`` goes, and only for whom ``store.lossy_for`` names.
        """
        full = self._node.pool.lookup(keys)
        codecs = self._node.config.store.codecs
        rest = keys[full:]
        codec = next((make_codec(c) for c in codecs if rest and self._serves(rest[0], make_codec(c), use)), None)
        if codec is None:
            return keys
        copied = list(takewhile(lambda key: self._serves(key, codec, use), rest))
        names = list(keys[:full])
        until = self._node.clock() + limit_s
        work = self._node.spawn(self._decode(copied, codec, use, names, until))
        await asyncio.wait({work}, timeout=limit_s)  # not cancelled: a thread may be writing
        return list(names)

    def _serves(self, key: bytes, codec: Codec, use: Use) -> bool:
        entry = self._find(copy_key(key, codec.name))
        return entry is not None and self.allowed(entry.layout, use)

    async def _decode(self, keys: Sequence[bytes], codec: Codec, use: Use, names: list[bytes], until: float) -> None:
        """Append to ``names`` those of the full blocks made of the copies of ``keys``, until one cannot be made in time."""
        parent: bytes | None = None  # of no full block's kin: what was decoded is none of those that are encoded
        for i in range(0, len(keys), STEP):
            async with self._decoding:
                came = await self._decode_part(keys[i : i + STEP], codec, use, parent, until)
            names += came
            if len(came) < len(keys[i : i + STEP]):
                return
            parent = names[-1]

    async def _decode_part(
        self, keys: Sequence[bytes], codec: Codec, use: Use, parent: bytes | None, until: float
    ) -> list[bytes]:
        """Names of the leading full blocks that are here then."""
        node = self._node
        wanted, copies = [read_key(key, codec.name) for key in keys], [copy_key(key, codec.name) for key in keys]
        first = self._find(copies[0])
        if first is None or node.clock() > until:
            return []
        small, full = first.layout, replace(first.layout, codec=RAW)
        await node.bring(small, copies, use, until - node.clock())
        self._decoded += await self._make(copies, small, wanted, full, parent, use, partial(decode, codec, full))
        await node.bring(full, wanted, use, until - node.clock())  # those decoded earlier that went down since
        return wanted[: node.pool.lookup(wanted)]

    # Both.

    async def _make(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        names: Sequence[bytes],
        target: KVLayout,
        parent: bytes | None,
        use: Use,
        make: Make,
    ) -> int:
        """Blocks ``names`` of layout ``target``, each made of its own of ``keys``; those that are here are left alone.

        Returns how many were made: all up to the first that could not be.
        """
        node, pool = self._node, self._node.pool
        ticket = pool.pin(OURSELVES, keys, use, node.clock())
        if not ticket.slots:
            return 0
        try:
            given = pool.reserve(
                OURSELVES,
                Life(node.member.id, node.member.incarnation),
                target,
                names[: len(ticket.slots)],
                parent,
                use,
                node.clock(),
            )
            jobs = [
                _Job(source, one.slot, one.id)
                for source, one in zip(ticket.slots, given, strict=True)
                if one.state is Reserved.NEW and one.slot is not None
            ]
            made, bad = await asyncio.to_thread(self._run, jobs, layout, target, make)
            pool.seal(OURSELVES, [job.reservation for job in jobs[:made]], node.clock())
            pool.abandon(OURSELVES, [job.reservation for job in jobs[made:]], node.clock())
            if bad is not None:
                pool.quarantine(bad, PLACE)
            return made
        finally:
            pool.unpin(OURSELVES, ticket.id, node.clock())
            node.changed()

    def _run(self, jobs: Sequence[_Job], layout: KVLayout, target: KVLayout, make: Make) -> tuple[int, bytes | None]:
        """In a thread: how many jobs were done, and the key of a source that differs from its digests."""
        views = self._node.regions.views
        for done, job in enumerate(jobs):
            try:
                block = make(_checked(layout, views[job.source.region], job.source))
            except DigestMismatch:
                return done, job.source.key
            if block is None:
                return done, None
            slices.fill(target, views[job.target.region], job.target.offset, job.target.key, block)
        return len(jobs), None


def _parts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """At most ``STEP`` blocks each, which follow one another and are of one user."""
    part: list[Entry] = []
    for entry in entries:
        if part and (entry.parent != part[-1].key or entry.use != part[-1].use or len(part) == STEP):
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _checked(layout: KVLayout, region: Bytes, ref: SlotRef) -> Bytes:
    """A private copy of a block, every slice of which agrees with its digest; DigestMismatch where one does not."""
    out = np.empty(layout.block_bytes, np.uint8)
    for layer in range(layout.layers):
        into = out[layer * layout.slice_bytes : (layer + 1) * layout.slice_bytes]
        slices.read(layout, region, ref.offset, layer, ref.key, layout.block_tokens, into)
    return out
