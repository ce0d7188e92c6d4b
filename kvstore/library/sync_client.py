"""The store library for programs without an event loop; ``store_client`` is for those with one. See docs/library.md."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest, PeerSilent, TransferFailed
from moonpool.core.layout import KVLayout
from moonpool.core.use import DEFAULT_TENANT
from moonpool.kvstore.library import arguments, values
from moonpool.kvstore.library.getting import get_blocks, get_values, in_frames
from moonpool.kvstore.library.host_link import HostLink, find_socket
from moonpool.kvstore.library.items import BlockItem, Item, Put, ValueItem
from moonpool.kvstore.library.objects import NONCE_BYTES, Names, Shape
from moonpool.kvstore.library.putting import Putting
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Kind, Link

Key = str | bytes
FETCH_MS = 2_000
T = TypeVar("T")


class SyncStoreClient:
    """Made by ``connect``. Any thread may call; one call runs at a time. After an error of the connection the next call
    connects anew. A value once put does not change: remove it first to put another.
    """

    def __init__(self, path: Path, namespace: str, tenant: str, fetch_ms: int) -> None:
        self._path = path
        self._namespace = namespace
        self._tenant = tenant
        self._fetch_ms = fetch_ms
        self._number = secrets.randbits(32)  # tells the clients of one process apart
        self._lock = Lock()
        self._link: HostLink | None = None
        self._names: Names | None = None
        self._layouts: dict[KVLayout, int] = {}
        self._closed = False

    @classmethod
    def connect(
        cls, path: str | os.PathLike[str], *, namespace: str = "default", tenant: str = DEFAULT_TENANT, fetch_ms: int = FETCH_MS
    ) -> SyncStoreClient:
        """``path``: a store node's socket, or the state folder it lies in. ``fetch_ms``: how long a get may wait for what is
        not in this host's memory, but on its SSD tier or with another node; 0: such values are misses.

        ConfigError where there is no socket, or several; InvalidRequest: a name of no, or above 256 bytes; PeerSilent where
        nobody answers.
        """
        names = arguments.name(namespace, "namespace"), arguments.name(tenant, "tenant")
        wait_ms = arguments.milliseconds(fetch_ms, "fetch_ms")
        client = cls(find_socket(path), *names, wait_ms)
        client._call(lambda link: None)
        return client

    def close(self) -> None:
        """Pins end. Again is a no-op."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()

    def __enter__(self) -> SyncStoreClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Values by name.

    def put(self, key: Key, value: Any) -> Put:
        """Store ``value``: a buffer, a numpy array, a torch tensor, or a list of buffers (stored one after the other)."""
        return self.put_many([(key, value)])[0]

    def put_many(self, items: Sequence[tuple[Key, Any]]) -> list[Put]:
        """Each value is stored whole or not at all, and can be found once this returns.

        Of values with one key in ``items`` the first counts; the answer for the others is what holds for it: THERE where it
        was stored. InvalidRequest, and nothing is stored: one of them is nothing that can be stored, or they do not fit into
        the pool, even if it were empty.
        """
        given = arguments.named_values(items)
        first: dict[bytes, int] = {}
        for i, one in enumerate(given):
            first.setdefault(one.name, i)
        if len(first) == len(given):
            return self._call(lambda link: self._put(link, given))
        puts = self._call(lambda link: self._put(link, [given[i] for i in first.values()]))
        said = dict(zip(first, puts, strict=True))
        again = {name: Put.THERE if put is Put.STORED else put for name, put in said.items()}
        return [said[one.name] if first[one.name] == i else again[one.name] for i, one in enumerate(given)]

    def _put(self, link: HostLink, given: Sequence[arguments.Named]) -> list[Put]:
        arguments.require_room(given, link.region_sizes)

        def made() -> Iterator[Item]:
            nonce, headers = secrets.randbits(8 * NONCE_BYTES - 64) << 64, dict[Shape, bytes]()
            for i, (name, value, _) in enumerate(given):
                yield ValueItem(self._key(name), value, nonce + i, headers)

        return Putting(link).run(made())

    def get(self, key: Key, into: Any = None) -> Any:
        """The value, or None where it is not here (or was damaged: then it is gone).

        A buffer comes back as a bytearray, arrays and tensors as such. With ``into``, a writable buffer or a list of them
        of the value's size, the bytes are copied there and the answer is ``into``. An array or tensor that does not have the
        value's dtype and shape is refused, unless it is uint8 of one dimension: plain bytes.
        """
        return self.get_many([key], None if into is None else [into])[0]

    def get_many(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> list[Any]:
        """``get`` for each key, in batches."""
        names = arguments.user_keys(keys)
        targets = None
        if into is not None:
            targets = [values.target(one) for one in arguments.listed(into, "into", "get_many(keys, [buffer, ...])")]
            if len(targets) != len(names):
                raise InvalidRequest(f"into: {len(targets)} targets for {len(names)} keys; give one for each", param="into")
        return self._call(lambda link: get_values(link, [self._key(name) for name in names], targets, self._fetch_ms))

    def exists(self, key: Key) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        """In any order; pins nothing, so a later get may still miss."""
        names = arguments.user_keys(keys)
        return self._call(lambda link: self._exists(link, [self._key(name) for name in names]))

    def remove(self, *keys: Key) -> int:
        """How many values were here and are no longer. What somebody is just reading stays."""
        names = arguments.user_keys(keys)
        return self._call(lambda link: self._remove(link, [self._key(name) for name in names], whole=True))

    # Blocks of KV by block key.

    def put_blocks(
        self, layout: KVLayout, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None
    ) -> list[Put]:
        """Whole [block_bytes] blocks that follow one another; ``parent`` is the block before the first (None: none is)."""
        of = arguments.layout(layout)
        before = None if parent is None else arguments.block_key(parent, "parent")
        each = arguments.blocks(of, blocks)

        def run(link: HostLink) -> list[Put]:
            arguments.require_room_for_blocks(of, len(each), link.region_sizes)
            number = self._layout(link, of)
            first = Link.NONE if before is None else Link.PARENT
            made = (BlockItem(of, number, key, block, Link.BEFORE if i else first) for i, (key, block) in enumerate(each))
            return Putting(link, before).run(made)

        return self._call(run)

    def get_blocks(self, layout: KVLayout, keys: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> int:
        """Copies the leading blocks that are here into ``into`` ([block_bytes] each), verified. Returns how many."""
        of, wanted = arguments.layout(layout), arguments.block_keys(keys)
        targets = arguments.block_targets(of, into)
        if len(targets) != len(wanted):
            raise InvalidRequest(f"into: {len(targets)} targets for {len(wanted)} keys; give one for each", param="into")
        return self._call(lambda link: get_blocks(link, of, self._layout(link, of), wanted, targets))

    def exists_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """For each block key; also for a block whose predecessors are not asked for."""
        wanted = arguments.block_keys(keys)
        return self._call(lambda link: self._exists(link, wanted))

    def lookup_blocks(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here."""
        wanted = arguments.block_keys(keys)

        def run(link: HostLink) -> int:
            found = 0
            for part in in_frames(wanted):
                _, frame = link.ask(frames.encode_keys(Kind.LOOKUP, link.number(), part))
                found += (here := frames.decode_count(frame))
                if here < len(part):
                    break
            return found

        return self._call(run)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Blocks, and all that follow them."""
        wanted = arguments.block_keys(keys)
        return self._call(lambda link: self._remove(link, wanted, whole=False))

    # How calls are made.

    def _call(self, work: Callable[[HostLink], T]) -> T:
        with self._lock:
            if self._closed:
                raise InvalidRequest("client: it was closed; connect another one", param="client")
            link = self._link
            if link is None or link.over is not None:
                self._layouts.clear()
                link = self._link = HostLink.open(self._path, self._number, self._tenant)
                self._names = Names(link.welcome.names_key, self._namespace, self._tenant)
            try:
                return work(link)
            finally:
                if link.waiting:
                    link.close()  # its answers belong to a call that is over

    def key(self, key: Key) -> bytes:
        """The 16-byte block key that ``key`` has in this namespace."""
        return self._key(arguments.user_key(key))

    def _key(self, name: bytes) -> bytes:
        if self._names is None:
            raise PeerSilent("the client has not been connected")
        return self._names.key(name)

    def _layout(self, link: HostLink, layout: KVLayout) -> int:
        """The node's number of ``layout``. LayoutMismatch where its model is known there with another one."""
        number = self._layouts.get(layout)
        if number is None:
            _, frame = link.ask(frames.encode_layout(link.number(), layout))
            number, slot_bytes = frames.decode_layout_number(frame)
            if slot_bytes != layout.slot_bytes:
                raise TransferFailed(f"slots have {slot_bytes} bytes at the store node, {layout.slot_bytes} here")
            self._layouts[layout] = number
        return number

    def _exists(self, link: HostLink, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for part in in_frames(keys):
            head, frame = link.ask(frames.encode_keys(Kind.EXISTS, link.number(), part))
            found += map(bool, frames.decode_bits(frame, head.items))
        return found

    def _remove(self, link: HostLink, keys: Sequence[bytes], *, whole: bool) -> int:
        removed = 0
        for part in in_frames(keys):
            _, frame = link.ask(frames.encode_keys(Kind.REMOVE, link.number(), part, word=int(whole)))
            removed += frames.decode_count(frame)
        return removed
