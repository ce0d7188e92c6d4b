"""Follows the block events of every live store node: a snapshot, then numbered batches, over each node's Watch stream."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from moonpool.core.errors import InvalidRequest
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import frames, pb
from moonpool.wire.channels import dial

BACKOFF_S = (0.05, 2.0)
DECODE_IN_THREAD_BYTES = 1 << 20
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", frames.MAX_SNAPSHOT_BYTES + 4096)]

# Takes what a node said; True: events are missing, the stream has to begin anew with a snapshot.
Heard = Callable[[EventBatch | IndexSnapshot], bool]
# Number of the next event wanted from this life of a node; 0: a snapshot.
Wanted = Callable[[NodeId, Incarnation], int]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Follower:
    member: Member
    task: asyncio.Task[None]


@dataclass(slots=True)
class StoreWatches:
    """Event-loop only. One task per live store node; it reconnects until membership says that the node is not live.

    A node says its next number at least once per ``silent_after``; one not heard for ``quiet_s`` is connected to anew.
    """

    heard: Heard
    wanted: Wanted
    quiet_s: float
    connected: int = 0
    reconnects: int = 0
    bad_frames: int = 0
    _followers: dict[NodeId, _Follower] = field(default_factory=dict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def on_change(self, change: MemberChange) -> None:
        member = change.member
        if member.role is not Role.STORE:
            return
        known = self._followers.get(member.node)
        if known is not None:
            same = known.member.incarnation == member.incarnation
            if member.incarnation < known.member.incarnation or (same and change.liveness is Liveness.LIVE):
                return
            del self._followers[member.node]
            self._end(known.task)
        if change.liveness is Liveness.LIVE:
            task = asyncio.create_task(self._follow(member), name=f"watch-{member.id}")
            self._followers[member.node] = _Follower(member, task)

    async def close(self) -> None:
        for follower in self._followers.values():
            self._end(follower.task)
        self._followers.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    async def _follow(self, member: Member) -> None:
        wait = BACKOFF_S[0]
        async with dial(member.address, options=CHANNEL_OPTIONS) as channel:
            stub = pb.store_rpc.StoreStub(channel)
            while True:
                try:
                    if await self._listen(member, stub):
                        wait = BACKOFF_S[0]
                except grpc.aio.AioRpcError as e:
                    log.info("watch of %s: %s: %s", member.id, e.code().name.lower(), e.details())
                except TimeoutError:
                    log.info("watch of %s: nothing heard for %.1f s", member.id, self.quiet_s)
                except InvalidRequest as e:
                    self.bad_frames += 1
                    log.warning("watch of %s: %s", member.id, e.message)
                except Exception:  # one frame that cannot be taken in must not be the last one heard of this node
                    self.bad_frames += 1
                    log.exception("watch of %s", member.id)
                self.reconnects += 1
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, BACKOFF_S[1])

    async def _listen(self, member: Member, stub: Any) -> bool:
        """One call, until it ends or events are missing. True: it brought at least one good frame."""
        number = self.wanted(member.node, member.incarnation)
        call = stub.Watch(pb.store.WatchRequest(incarnation=member.incarnation, next_number=number))
        good = False
        try:
            while True:
                async with asyncio.timeout(self.quiet_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return good
                event = await _decoded(message.frame)
                if event.holder != member.node:
                    raise InvalidRequest(f"frame: events of {event.holder!r} on the stream of node {member.node!r}")
                if not good:
                    good = True
                    self.connected += 1
                if self.heard(event):
                    return good
        finally:
            call.cancel()
            self.connected -= int(good)


async def _decoded(frame: bytes) -> EventBatch | IndexSnapshot:
    """InvalidRequest where it is neither events nor a snapshot. A large snapshot is decoded beside the event loop."""
    if frames.kind_of(frame) is not frames.Kind.SNAPSHOT:
        return frames.decode_events(frame)
    if len(frame) < DECODE_IN_THREAD_BYTES:
        return frames.decode_snapshot(frame)
    return await asyncio.to_thread(frames.decode_snapshot, frame)
