"""The store library for programs with an event loop: ``SyncStoreClient``'s calls, each made in one thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import KVLayout
from moonpool.core.use import DEFAULT_TENANT
from moonpool.kvstore.library.items import Put
from moonpool.kvstore.library.sync_client import FETCH_MS, Key, SyncStoreClient

T = TypeVar("T")


class StoreClient:
    """Made by ``connect``; ``connect_sync`` gives the same calls without ``await``. See ``SyncStoreClient`` for each.

    One call runs at a time, the others wait their turn. A cancelled call still runs to its end before the cancellation
    goes on: the buffers it was given are the caller's again then.
    """

    def __init__(self, client: SyncStoreClient, thread: ThreadPoolExecutor) -> None:
        self._client = client
        self._thread = thread

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str], *, namespace: str = "default", tenant: str = DEFAULT_TENANT, fetch_ms: int = FETCH_MS
    ) -> StoreClient:
        """``path``: a store node's socket, or the state folder it lies in. ``fetch_ms``: how long a get may wait for what is
        not in this host's memory, but on its SSD tier or with another node; 0: such values are misses.

        ConfigError where there is no socket; PeerSilent where nobody answers.
        """
        thread = ThreadPoolExecutor(1, "store client")
        try:
            connect = partial(SyncStoreClient.connect, path, namespace=namespace, tenant=tenant, fetch_ms=fetch_ms)
            return cls(await asyncio.get_running_loop().run_in_executor(thread, connect), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @staticmethod
    def connect_sync(
        path: str | os.PathLike[str], *, namespace: str = "default", tenant: str = DEFAULT_TENANT, fetch_ms: int = FETCH_MS
    ) -> SyncStoreClient:
        return SyncStoreClient.connect(path, namespace=namespace, tenant=tenant, fetch_ms=fetch_ms)

    async def close(self) -> None:
        """Waits for the calls that were begun. Again is a no-op."""
        await asyncio.to_thread(self._thread.shutdown)
        self._client.close()

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def put(self, key: Key, value: Any) -> Put:
        return await self._run(partial(self._client.put, key, value))

    async def put_many(self, items: Sequence[tuple[Key, Any]]) -> list[Put]:
        return await self._run(partial(self._client.put_many, items))

    async def get(self, key: Key, into: Any = None) -> Any:
        return await self._run(partial(self._client.get, key, into))

    async def get_many(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> list[Any]:
        return await self._run(partial(self._client.get_many, keys, into))

    async def exists(self, key: Key) -> bool:
        return await self._run(partial(self._client.exists, key))

    async def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        return await self._run(partial(self._client.exists_many, keys))

    async def remove(self, *keys: Key) -> int:
        return await self._run(partial(self._client.remove, *keys))

    async def put_blocks(
        self, layout: KVLayout, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None
    ) -> list[Put]:
        return await self._run(partial(self._client.put_blocks, layout, blocks, parent))

    async def get_blocks(self, layout: KVLayout, keys: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> int:
        return await self._run(partial(self._client.get_blocks, layout, keys, into))

    async def exists_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._run(partial(self._client.exists_blocks, keys))

    async def lookup_blocks(self, keys: Sequence[bytes]) -> int:
        return await self._run(partial(self._client.lookup_blocks, keys))

    async def remove_blocks(self, keys: Sequence[bytes]) -> int:
        return await self._run(partial(self._client.remove_blocks, keys))

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as e:  # its thread was shut down
            raise InvalidRequest("client: it was closed; connect another one", param="client") from e
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise
