"""One connection to one etcd server: every call bounded, every failure an ``Away``.

Of ``etcd3aio`` come the messages and stubs. Its retries, leases and watches are not used: its watch resumes at a revision
that it may not have heard yet and hangs below a compacted one, its locks do not renew their leases, its channels want
addresses, and its calls share the process's event loops (see ``stream``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from etcd3aio import _protobuf as etcd
from etcd3aio import prefix_range_end
from etcd3aio.kv import KVService

from moonpool.cluster.etcd.book import Item
from moonpool.cluster.etcd.login import Login
from moonpool.cluster.etcd.stream import Ended, Metadata, Stream, Unary, unary

T = TypeVar("T")

CALL_S = 2.5
PAGE = 16  # keys a read asks for at once: what others put there may be large
OPTIONS = (
    ("grpc.lb_policy_name", "pick_first"),  # round_robin would connect again by itself, with everybody else at once
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # a back-off of another connection must not hold this one
    ("grpc.max_receive_message_length", 32 << 20),
)
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


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says of itself. ``bytes``: of its database. ``leader``: whether it knows one."""

    version: str
    bytes: int
    leader: bool


class Etcd:
    """``answered`` is called at every answer: a sign of life. Use it on one event loop."""

    def __init__(self, endpoint: str, answered: Callable[[], None], login: Login) -> None:
        self._channel, self._login = login.dial(f"dns:///{endpoint}", OPTIONS), login
        self._kv, self._leases = etcd.KVStub(self._channel), etcd.LeaseStub(self._channel)
        self._watches = etcd.WatchStub(self._channel)
        self._renewals: Stream[Any, Any] | None = None
        self._answered = answered
        self._metadata: Metadata = ()

    def close(self) -> None:
        if self._renewals:
            self._renewals.close()
        self._channel.close()

    async def read(self, prefix: bytes) -> tuple[list[Item], int]:
        """Everything under ``prefix`` as of one revision, and that revision."""
        items: list[Item] = []
        start, end, revision = prefix, prefix_range_end(prefix), 0
        while True:
            request = etcd.RangeRequest(key=start, range_end=end, revision=revision, limit=PAGE)
            page = await self._ask(self._kv.Range, request)
            revision = revision or page.header.revision
            items += [Item(kv.key, kv.value, kv.mod_revision) for kv in page.kvs]
            if not page.more:
                return items, revision
            start = items[-1].key + b"\0"

    async def get(self, key: bytes) -> Item | None:
        found = await self._ask(self._kv.Range, etcd.RangeRequest(key=key))
        return Item(key, found.kvs[0].value, found.kvs[0].mod_revision) if found.kvs else None

    async def put_if(
        self, expected: Mapping[bytes, int], puts: Sequence[Put] = (), deletes: Sequence[bytes] = ()
    ) -> int | None:
        """All of it, where every key is at its expected revision (0: it is not there). The new revision, or None."""
        compares = [
            etcd.Compare(result=etcd.Compare.EQUAL, target=etcd.Compare.MOD, key=key, mod_revision=revision)
            for key, revision in expected.items()
        ]
        operations = [KVService.txn_op_put(put.key, put.value, lease=put.lease) for put in puts]
        operations += [KVService.txn_op_delete(key) for key in deletes]
        done = await self._ask(self._kv.Txn, etcd.TxnRequest(compare=compares, success=operations))
        return int(done.header.revision) if done.succeeded else None

    async def compact(self, revision: int) -> None:
        """History up to ``revision`` is forgotten."""
        await self._ask(self._kv.Compact, etcd.CompactionRequest(revision=revision, physical=True))

    async def grant(self, ttl_s: int) -> tuple[int, float]:
        """A new lease and its seconds; etcd lengthens what is below its own minimum."""
        granted = await self._ask(self._leases.LeaseGrant, etcd.LeaseGrantRequest(TTL=ttl_s))
        return int(granted.ID), float(granted.TTL)

    async def renew(self, lease: int) -> None:
        """One at a time."""
        if self._renewals is None:
            self._renewals = Stream(self._leases.LeaseKeepAlive, await self._token())
        self._renewals.send(etcd.LeaseKeepAliveRequest(ID=lease))
        answer = await self._hear(self._renewals.next(), CALL_S)
        if answer.TTL <= 0:
            raise LeaseLost

    async def status(self) -> ServerStatus:
        says = await self._ask(etcd.MaintenanceStub(self._channel).Status, etcd.StatusRequest())
        return ServerStatus(str(says.version), int(says.dbSize), bool(says.leader))

    async def revoke(self, lease: int) -> None:
        await self._ask(self._leases.LeaseRevoke, etcd.LeaseRevokeRequest(ID=lease))

    async def watch(self, prefix: bytes, revision: int, sign_s: float, quiet_s: float) -> AsyncGenerator[list[Item], None]:
        """Changes from ``revision`` on; an empty list is a sign of life, asked for every ``sign_s``.

        Compacted where the revision is gone; Away after ``quiet_s`` without any answer.
        """
        create = etcd.WatchCreateRequest(key=prefix, range_end=prefix_range_end(prefix), start_revision=revision)
        stream: Stream[Any, Any] = Stream(self._watches.Watch, (*REQUIRE_LEADER, *await self._token()))
        stream.send(etcd.WatchRequest(create_request=create))
        signs = asyncio.create_task(_ask_for_signs(stream, sign_s), name="etcd-signs")
        try:
            while True:
                answer = await self._hear(stream.next(), quiet_s)
                if answer.canceled:
                    raise Compacted if answer.compact_revision else Away(f"watch cancelled: {answer.cancel_reason}")
                yield [
                    Item(event.kv.key, event.kv.value if event.type == event.PUT else None, event.kv.mod_revision)
                    for event in answer.events
                ]
        finally:
            signs.cancel()
            stream.close()

    async def _ask(self, method: Unary[Any], request: object) -> Any:
        return await self._hear(unary(method, request, CALL_S, await self._token()), 2 * CALL_S)

    async def _token(self) -> Metadata:
        """What goes with every call where etcd has users: a token, good for as long as this connection is used."""
        if self._login.user and not self._metadata:
            name, password = self._login.user
            request = etcd.AuthenticateRequest(name=name, password=password)
            answer = await self._hear(unary(etcd.AuthStub(self._channel).Authenticate, request, CALL_S), 2 * CALL_S)
            self._metadata = (("token", answer.token),)
        return self._metadata

    async def _hear(self, answering: Awaitable[T], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s):
                answer = await answering
        except grpc.RpcError as e:
            if e.code() is grpc.StatusCode.NOT_FOUND:
                raise LeaseLost from e
            raise Away(f"{e.code().name}: {e.details()}") from e
        except (Ended, TimeoutError, grpc.FutureCancelledError) as e:
            raise Away(str(e) or f"no answer within {limit_s} s") from e
        self._answered()
        return answer


async def _ask_for_signs(stream: Stream[Any, Any], every_s: float) -> None:
    sign = etcd.WatchRequest()
    sign.progress_request.SetInParent()
    while True:
        await asyncio.sleep(every_s)
        stream.send(sign)
