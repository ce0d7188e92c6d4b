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

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import InvalidRequest, PeerSilent, TransferFailed
from moonpool.core.layout import KVLayout
from moonpool.core.use import DEFAULT_TENANT
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

        ConfigError where there is no socket; PeerSilent where nobody answers.
        """
        client = cls(find_socket(Path(path)), namespace, tenant, fetch_ms)
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

        InvalidRequest: one of them is nothing that can be stored; those before it are stored.
        """

        def made() -> Iterator[Item]:
            nonce, headers = secrets.randbits(8 * NONCE_BYTES - 64) << 64, dict[Shape, bytes]()
            for i, (key, value) in enumerate(items):
                yield ValueItem(self.key(key), value, nonce + i, headers)

        return self._call(lambda link: Putting(link).run(made()))

    def get(self, key: Key, into: Any = None) -> Any:
        """The value, or None where it is not here (or was damaged: then it is gone).

        A buffer comes back as a bytearray, arrays and tensors as such. With ``into``, a writable buffer or a list of them
        of the value's size, the bytes are copied there and the answer is ``into``.
        """
        return self.get_many([key], None if into is None else [into])[0]

    def get_many(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> list[Any]:
        """``get`` for each key, in batches."""
        if into is not None and len(into) != len(keys):
            raise InvalidRequest(f"into: {len(into)} targets for {len(keys)} keys", param="into")
        return self._call(lambda link: get_values(link, [self.key(key) for key in keys], into, self._fetch_ms))

    def exists(self, key: Key) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        """In any order; pins nothing, so a later get may still miss."""
        return self._call(lambda link: self._exists(link, [self.key(key) for key in keys]))

    def remove(self, *keys: Key) -> int:
        """How many values were here and are no longer. What somebody is just reading stays."""
        return self._call(lambda link: self._remove(link, [self.key(key) for key in keys], whole=True))

    # Blocks of KV by block key.

    def put_blocks(
        self, layout: KVLayout, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None
    ) -> list[Put]:
        """Whole [block_bytes] blocks that follow one another; ``parent`` is the block before the first (None: none is)."""

        checked = [(_checked(key), _block(layout, block)) for key, block in blocks]

        def made(number: int) -> Iterator[Item]:
            for i, (key, block) in enumerate(checked):
                yield BlockItem(layout, number, key, block, Link.BEFORE if i else Link.PARENT if parent else Link.NONE)

        return self._call(lambda link: Putting(link, parent).run(made(self._layout(link, layout))))

    def get_blocks(self, layout: KVLayout, keys: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> int:
        """Copies the leading blocks that are here into ``into`` ([block_bytes] each), verified. Returns how many."""
        targets = [_block(layout, one) for one in into]
        if len(targets) != len(keys):
            raise InvalidRequest(f"into: {len(targets)} targets for {len(keys)} keys", param="into")
        return self._call(lambda link: get_blocks(link, layout, self._layout(link, layout), keys, targets))

    def exists_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """For each block key; also for a block whose predecessors are not asked for."""
        return self._call(lambda link: self._exists(link, [_checked(key) for key in keys]))

    def lookup_blocks(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here."""

        def run(link: HostLink) -> int:
            found = 0
            for part in in_frames(keys):
                _, frame = link.ask(frames.encode_keys(Kind.LOOKUP, link.number(), part))
                found += (here := frames.decode_count(frame))
                if here < len(part):
                    break
            return found

        return self._call(run)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Blocks, and all that follow them."""
        return self._call(lambda link: self._remove(link, keys, whole=False))

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
        if self._names is None:
            raise PeerSilent("the client has not been connected")
        return self._names.key(key.encode() if isinstance(key, str) else key)

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


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"keys: a block key has {KEY_BYTES} bytes, this one {len(key)}", param="keys")
    return key


def _block(layout: KVLayout, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if block.dtype != np.uint8 or block.shape != (layout.block_bytes,):
        raise InvalidRequest(
            f"blocks: {block.dtype} of shape {block.shape} where uint8 [{layout.block_bytes}] is a block", param="blocks"
        )
    return block
