"""Subscribers of block events: first a snapshot, then what follows without a gap, whatever they do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.store import Roll, block_keys, config, store_node, worker

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, NodeId
from moonpool.kvstore.event_log import EventLog
from moonpool.kvstore.watch import HISTORY, QUEUE, Watchers
from moonpool.wire import pb
from moonpool.wire.frames import Kind, decode_events, decode_snapshot, kind_of

NODE, LIFE = NodeId("a"), Incarnation(5)


class Source:
    """A node's events, and its index as a plain set."""

    def __init__(self) -> None:
        self.log = EventLog(NODE, LIFE)
        self.keys: dict[bytes, None] = {}
        self.watchers = Watchers(NODE, LIFE, self.snapshot)

    def snapshot(self) -> IndexSnapshot:
        self.watchers.publish(self.log.take())
        return self.log.snapshot([(Tier.G2, list(self.keys))])

    def store(self, *keys: bytes) -> None:
        for key in keys:
            self.log.record(BlockChange.STORED, Tier.G2, [key])
            self.keys[key] = None
        self.watchers.publish(self.log.take())

    def remove(self, key: bytes) -> None:
        self.log.record(BlockChange.REMOVED, Tier.G2, [key])
        del self.keys[key]
        self.watchers.publish(self.log.take())


class Subscriber:
    """Follows one node as a conductor does: snapshot, events in order, nothing else."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.next = 0

    def hear(self, frame: bytes) -> None:
        if kind_of(frame) is Kind.SNAPSHOT:
            shot = decode_snapshot(frame)
            self.keys = {key for _, keys in shot.entries for key in keys}
            self.next = shot.number + 1
            return
        batch = decode_events(frame)
        assert batch.number == self.next, "a gap"
        for event in batch.events:
            (self.keys.update if event.change is BlockChange.STORED else self.keys.difference_update)(event.keys)
        self.next += len(batch.events)


async def follow(source: Source, subscriber: Subscriber, frames: int, *, again: bool = False) -> None:
    """Hear so many frames, then leave."""
    stream = source.watchers.frames(LIFE if again else 0, subscriber.next if again else 0, 10.0)
    for _ in range(frames):
        subscriber.hear(await asyncio.wait_for(anext(stream), 5))
    await stream.aclose()


async def test_a_subscriber_gets_a_snapshot_and_then_what_follows() -> None:
    source, subscriber = Source(), Subscriber()
    source.store(b"a", b"b")
    stream = source.watchers.frames(0, 0, 10.0)
    subscriber.hear(await anext(stream))
    source.remove(b"b")
    source.store(b"c")
    for _ in range(2):
        subscriber.hear(await anext(stream))
    assert subscriber.keys == set(source.keys)
    await stream.aclose()
    assert len(source.watchers) == 0


async def test_one_that_comes_back_goes_on_where_it_was() -> None:
    source, subscriber = Source(), Subscriber()
    source.store(b"a")
    await follow(source, subscriber, 1)
    source.store(b"b")
    source.remove(b"a")
    await follow(source, subscriber, 2, again=True)
    assert subscriber.keys == {b"b"}


async def test_one_that_was_away_too_long_or_knows_another_life_gets_a_snapshot() -> None:
    source, subscriber = Source(), Subscriber()
    source.store(b"a")
    await follow(source, subscriber, 1)
    for i in range(HISTORY + 1):
        source.store(b"k%d" % i)
    await follow(source, subscriber, 1, again=True)
    assert subscriber.keys == set(source.keys)
    stream = source.watchers.frames(LIFE + 1, subscriber.next, 10.0)
    assert kind_of(await anext(stream)) is Kind.SNAPSHOT
    await stream.aclose()


async def test_one_that_reads_too_slowly_is_cut_off_and_nobody_waits_for_it() -> None:
    source, slow = Source(), Subscriber()
    stream = source.watchers.frames(0, 0, 10.0)
    slow.hear(await anext(stream))
    next_frame = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it waits, and is then left alone
    for i in range(QUEUE + 10):
        source.store(b"k%d" % i)
    assert source.watchers.cut == 1
    assert len(source.watchers) == 0
    with pytest.raises(StopAsyncIteration):
        await next_frame
    await follow(source, slow, 1, again=True)
    assert slow.keys == set(source.keys)


async def test_silence_is_broken_by_a_batch_that_names_the_next_number() -> None:
    source, subscriber = Source(), Subscriber()
    source.store(b"a")
    stream = source.watchers.frames(0, 0, 0.01)
    subscriber.hear(await anext(stream))
    batch = decode_events(await asyncio.wait_for(anext(stream), 5))
    assert (batch.number, batch.events) == (subscriber.next, ())
    await stream.aclose()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=30))
def test_long_logs_are_cut_into_batches_that_follow_one_another(changes: list[tuple[bool, int]]) -> None:
    log, replayed, subscriber = EventLog(NODE, LIFE), set(), Subscriber()
    subscriber.next = 1
    watchers = Watchers(NODE, LIFE, lambda: log.snapshot(()))
    for stored, size in changes:
        for i in range(size):
            key = b"%d" % i
            log.record(BlockChange.STORED if stored else BlockChange.REMOVED, Tier.G2, [key])
            (replayed.add if stored else replayed.discard)(key)
    watchers.publish(log.take())
    for _, frame in watchers._history:
        subscriber.hear(frame)
    assert subscriber.keys == replayed
    assert subscriber.next == log.head + 1


async def test_a_frozen_subscriber_is_cut_while_a_hundred_others_and_the_workers_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.kvstore.watch.QUEUE", 24)
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    keys = tuple(block_keys("e", 512))
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        async with grpc.aio.insecure_channel(node.member.address, options=small_window) as frozen_channel:
            frozen = pb.store_rpc.StoreStub(frozen_channel).Watch(pb.store.WatchRequest())
            await frozen.read()
            others = [client._stub.Watch(pb.store.WatchRequest()) for _ in range(100)]
            await asyncio.gather(*(other.read() for other in others))
            number = node.pool.held.log.head + 1
            for _ in range(20):
                for _ in range(4):
                    event = BlockEvent(BlockChange.STORED, Tier.G2, keys)
                    node.watchers.publish([EventBatch(node.member.node, node.member.incarnation, number, (event,))])
                    number += 1
                assert await client.lookup(block_keys("k", 1)) == 0
                for other in others:
                    for _ in range(4):
                        last = decode_events((await asyncio.wait_for(other.read(), 5)).frame)
                    assert last.number == number - 1
            assert (node.watchers.cut, len(node.watchers)) == (1, 100)
            while (message := await asyncio.wait_for(frozen.read(), 5)) is not grpc.aio.EOF:
                assert decode_events(message.frame).number < number - 24, "what was kept for it is given up"
            for other in others:
                other.cancel()
