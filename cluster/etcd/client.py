"""One connection to one etcd server, on ``etcd3aio``: every call bounded, every failure an ``Away``.

The library's own retries, leases and watches are not used: its watch resumes at a revision that it may not have heard yet and
hangs below a compacted one, its leases are not renewed by its locks, its names need ``dns:///``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from etcd3aio import EtcdError, prefix_range_end
from etcd3aio._protobuf import Compare, WatchCreateRequest, WatchRequest, WatchStub
from etcd3aio.connections import ConnectionManager
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from moonpool.cluster.etcd.book import Item

T = TypeVar("T")

CALL_S = 2.5
PAGE = 16  # keys a read asks for at once: what others put there may be large
MAX_MESSAGE = 32 << 20
REQUIRE_LEADER = (("hasleader", "true"),)  # a member cut off from the others ends the watch instead of falling behind


class Away(Exception):
    """etcd does not answer, or not as it should: this connection is of no more use."""


class LeaseLost(Exception):
    """The lease has lapsed, or this etcd never knew it."""


class Compacted(Exception):
    """The watched revision is no longer there: read everything again."""


@dataclass(frozen=True, slots=True)
class Put:
    """``lease`` 0: the key stays."""

    key: bytes
    value: bytes
    lease: int = 0


class Etcd:
    """``answered`` is called at every answer: a sign of life."""

    def __init__(self, endpoint: str, answered: Callable[[], None]) -> None:
        manager = ConnectionManager([endpoint])
        manager.target = f"dns:///{endpoint}"
        manager.grpc_options += [
            ("grpc.use_local_subchannel_pool", 1),  # a back-off of another connection must not hold this one
            ("grpc.max_receive_message_length", MAX_MESSAGE),
        ]
        self._channel = manager.get_channel()
        self._kv = KVService(self._channel, max_attempts=1)
        self._leases = LeaseService(self._channel, max_attempts=1)
        self._watches = WatchStub(self._channel)
        self._answered = answered

    async def close(self) -> None:
        await self._channel.close()

    async def read(self, prefix: bytes) -> tuple[list[Item], int]:
        """Everything under ``prefix`` as of one revision, and that revision."""
        items: list[Item] = []
        start, end, revision = prefix, prefix_range_end(prefix), 0
        while True:
            page = await self._ask(self._kv.get(start, end, revision=revision, limit=PAGE, timeout=CALL_S))
            revision = revision or page.header.revision
            items += [Item(kv.key, kv.value, kv.mod_revision) for kv in page.kvs]
            if not page.more:
                return items, revision
            start = items[-1].key + b"\0"

    async def get(self, key: bytes) -> Item | None:
        found = await self._ask(self._kv.get(key, timeout=CALL_S))
        return Item(key, found.kvs[0].value, found.kvs[0].mod_revision) if found.kvs else None

    async def put_if(
        self, expected: Mapping[bytes, int], puts: Sequence[Put] = (), deletes: Sequence[bytes] = ()
    ) -> int | None:
        """All of it, where every key is at its expected revision (0: it is not there). The new revision, or None."""
        compares = [
            Compare(result=Compare.EQUAL, target=Compare.MOD, key=key, mod_revision=revision)
            for key, revision in expected.items()
        ]
        operations = [KVService.txn_op_put(put.key, put.value, lease=put.lease) for put in puts]
        operations += [KVService.txn_op_delete(key) for key in deletes]
        done = await self._ask(self._kv.txn(compares, operations, timeout=CALL_S))
        return int(done.header.revision) if done.succeeded else None

    async def grant(self, ttl_s: int) -> tuple[int, float]:
        """A new lease and its seconds; etcd lengthens what is below its own minimum."""
        granted = await self._ask(self._leases.grant(ttl_s, timeout=CALL_S))
        return int(granted.ID), float(granted.TTL)

    async def renew(self, lease: int) -> None:
        call = self._leases.keep_alive(lease)

        async def first() -> int:
            async with asyncio.timeout(CALL_S):
                return int((await anext(aiter(call))).TTL)

        try:
            if await self._ask(first()) <= 0:
                raise LeaseLost
        except StopAsyncIteration as e:
            raise Away("lease: its stream ended") from e
        finally:
            call.cancel()

    async def revoke(self, lease: int) -> None:
        await self._ask(self._leases.revoke(lease, timeout=CALL_S))

    async def watch(self, prefix: bytes, revision: int, sign_s: float, quiet_s: float) -> AsyncGenerator[list[Item], None]:
        """Changes from ``revision`` on; an empty list is a sign of life, asked for every ``sign_s``.

        Compacted where the revision is gone; Away after ``quiet_s`` without any answer.
        """
        sign = WatchRequest()
        sign.progress_request.SetInParent()
        create = WatchCreateRequest(key=prefix, range_end=prefix_range_end(prefix), start_revision=revision)

        async def requests() -> AsyncIterator[WatchRequest]:
            yield WatchRequest(create_request=create)
            while True:
                await asyncio.sleep(sign_s)
                yield sign

        call = self._watches.Watch(requests(), metadata=REQUIRE_LEADER)
        answers = aiter(call)
        try:
            while True:
                async with asyncio.timeout(quiet_s):
                    answer = await self._ask(anext(answers))
                if answer.canceled:
                    raise Compacted if answer.compact_revision else Away(f"watch cancelled: {answer.cancel_reason}")
                yield [
                    Item(event.kv.key, event.kv.value if event.type == event.PUT else None, event.kv.mod_revision)
                    for event in answer.events
                ]
        except (TimeoutError, StopAsyncIteration) as e:
            raise Away(f"watch: {type(e).__name__}") from e
        finally:
            call.cancel()

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.NOT_FOUND:
                raise LeaseLost from e
            raise Away(f"{e.code().name}: {e.details()}") from e
        except (EtcdError, TimeoutError) as e:
            raise Away(str(e) or f"no answer within {CALL_S} s") from e
        self._answered()
        return answer
