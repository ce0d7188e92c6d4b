"""Watching through a line that is cut or hangs, past compactions, and over values that are no records."""

from __future__ import annotations

import asyncio
import os
import pickle  # noqa: TID251  to write one, never to read one
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.etcd_members import NAME, Seen, eventually, member, members, operator
from support.etcd_server import EtcdServer
from support.line import Line

from moonpool.cluster.etcd.book import Book, Item
from moonpool.cluster.etcd.client import Away, Compacted, Etcd, Put
from moonpool.cluster.etcd.records import MAX_BYTES, encode
from moonpool.cluster.etcd.registration import Registration
from moonpool.cluster.etcd.trust import Trust
from moonpool.cluster.etcd.watch import Watch
from moonpool.cluster.survey import members as list_members
from moonpool.core.errors import NoPath
from moonpool.core.membership import Liveness, MemberChange


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


async def compact(etcd: Etcd) -> None:
    """Away with all history."""
    _, revision = await etcd.read(b"/moonpool/")
    await etcd.compact(revision)


async def test_what_changed_while_a_watcher_was_cut_is_heard_although_its_history_was_compacted(etcd: EtcdServer) -> None:
    async with Line(etcd.port) as line, members(etcd.registry, 2) as (one, other):
        watcher = Seen(etcd.registry.replace(str(etcd.port), str(line.port)))
        await one.peers.join(member())
        await other.peers.join(member("prefill-1"))
        await watcher.hears((NAME, 1, "live"), ("prefill-1", 1, "live"))
        line.cut()
        one.peers.update(replace(member(), ready=False))
        await other.until(lambda: not other.known().member.ready)
        await one.peers.leave()
        await other.hears((NAME, 1, "gone"))
        async with operator(etcd.registry) as (client, _):
            await compact(client)
        assert watcher.known().liveness is Liveness.LIVE
        line.mend()
        await watcher.hears((NAME, 1, "gone"))
        assert [t[2] for t in watcher.told if t[0] == "prefill-1"] == ["live"]
        await watcher.peers.leave()


async def test_a_watch_below_the_compacted_revision_reads_everything_again(etcd: EtcdServer) -> None:
    heard: list[MemberChange] = []
    async with operator(etcd.registry) as (client, address):
        for step in range(3):
            change = MemberChange(replace(member(), ready=bool(step % 2)), Liveness.LIVE)
            await client.put_if({}, [Put(address.life(NAME), encode(change)), Put(address.beat(NAME), b"1")])
        await compact(client)
        with pytest.raises(Compacted):
            async for _ in client.watch(address.everything, 1, 0.05, 5.0):
                pass
        told = asyncio.Event()
        watch = Watch(address, Book(address), Trust(1.0, 1.0), 0.05, 5.0, heard.append, told.set)
        follow = asyncio.create_task(watch.follow(client, 1))
        await asyncio.wait_for(told.wait(), 5.0)
        assert [c.member.ready for c in heard] == [False]
        await client.put_if({}, [Put(address.life(NAME), encode(MemberChange(member(), Liveness.LIVE)))])
        while len(heard) < 2:
            told.clear()
            await asyncio.wait_for(told.wait(), 5.0)
        assert heard[-1].member.ready
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)


async def test_a_verdict_over_a_member_that_beats_again_does_not_stand(etcd: EtcdServer) -> None:
    """A watcher that lags must not call silent who registered under a new lease meanwhile."""
    async with operator(etcd.registry) as (client, address):
        live = Put(address.life(NAME), encode(MemberChange(member(), Liveness.LIVE)))
        await client.put_if({}, [live])
        trust = Trust(gap_s=60.0, grace_s=0.0)
        trust.answered(time.monotonic())
        watch = Watch(address, Book(address), trust, 0.01, 5.0, lambda change: None, lambda: None)
        await watch.begin(client)  # there is no beat yet
        await client.put_if({}, [Put(address.beat(NAME), b"1")])
        judge = asyncio.create_task(watch.judge(client))
        await asyncio.wait({judge}, timeout=0.3)
        item = await client.get(address.life(NAME))
        assert item is not None and item.value == live.value
        judge.cancel()
        await asyncio.gather(judge, return_exceptions=True)


async def test_a_silent_life_does_not_register_again_even_before_its_watch_tells_it(etcd: EtcdServer) -> None:
    fences: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    async with operator(etcd.registry) as (client, address):
        silent = Put(address.life(NAME), encode(MemberChange(member(), Liveness.SILENT, "it froze")))
        await client.put_if({}, [silent])
        registration = Registration(address, 1, lambda why, replaced: fences.put_nowait((why, replaced)))
        welcome = registration.begin(member())
        keep = asyncio.create_task(registration.keep(client))
        why, replaced = await asyncio.wait_for(fences.get(), 5.0)
        assert not replaced and "it froze" in why
        assert welcome.done(), "it was written in its time: whoever joined it waits no longer, and begins the next one"
        item = await client.get(address.life(NAME))
        assert item is not None and item.value == silent.value
        keep.cancel()
        await asyncio.gather(keep, return_exceptions=True)


async def test_a_life_that_its_watch_fenced_amid_a_registration_does_not_take_the_next_one_with_it(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    async with operator(etcd.registry) as (client, address), operator(etcd.registry) as (other, _):
        registration = Registration(address, 1, lambda why, replaced: fences.put_nowait((why, replaced)))
        welcome = registration.begin(member())
        keep = asyncio.create_task(registration.keep(client))
        await asyncio.wait_for(welcome, 5.0)
        get, asked, answers = client.get, asyncio.Event(), asyncio.Event()

        async def late(key: bytes) -> Item | None:
            asked.set()
            await answers.wait()
            return await get(key)

        monkeypatch.setattr(client, "get", late)
        registration.update(replace(member(), ready=False))
        await asyncio.wait_for(asked.wait(), 5.0)
        await other.put_if({}, [Put(address.life(NAME), encode(MemberChange(member(), Liveness.SILENT, "it froze")))])
        book = Book(address)
        await Watch(address, book, Trust(1.0, 1.0), 0.05, 5.0, lambda change: None, lambda: None).begin(other)
        registration.check(book)
        assert fences.get_nowait() == (f"{NAME}: was declared silent: it froze", False)
        welcome = registration.begin(member(incarnation=2))
        answers.set()
        await asyncio.wait_for(welcome, 5.0)
        assert fences.empty()
        keep.cancel()
        await asyncio.gather(keep, return_exceptions=True)


async def test_a_watch_that_hangs_is_noticed(etcd: EtcdServer) -> None:
    async with Line(etcd.port) as line, operator(f"etcd://127.0.0.1:{line.port}") as (client, address):
        _, revision = await client.read(address.everything)
        watch = client.watch(address.everything, revision, sign_s=0.05, quiet_s=1.0)
        assert await anext(watch) == []
        line.fall_silent()
        with pytest.raises(Away):
            async for _ in watch:
                pass


async def test_a_silent_line_keeps_the_view_and_is_replaced_when_it_carries_again(etcd: EtcdServer) -> None:
    async with Line(etcd.port) as line, members(etcd.registry, 1) as (one,):
        watcher = Seen(etcd.registry.replace(str(etcd.port), str(line.port)))
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        line.fall_silent()
        await watcher.shows("registry_connected", lambda connected: not connected)
        assert watcher.known().liveness is Liveness.LIVE
        one.peers.update(replace(member(), ready=False))
        line.mend()
        await watcher.until(lambda: not watcher.known().member.ready)
        await watcher.peers.leave()


async def test_lost_connections_leave_no_thread_and_no_descriptor_behind(etcd: EtcdServer) -> None:
    async with Line(etcd.port) as line:
        threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        one = Seen(etcd.registry.replace(str(etcd.port), str(line.port)))
        await one.peers.join(member())
        for lost in range(1, 4):
            line.cut()
            await one.shows("registry_connected", lambda connected: not connected)
            line.mend()
            await one.shows("registry_connected", bool)
            assert one.peers.numbers()["registry_attempts"] > lost
        await eventually(lambda: [t.name for t in threading.enumerate()].count("membership-etcd-stream") == 2)
        await one.peers.leave()

        def left() -> list[str]:
            return [t.name for t in set(threading.enumerate()) - threads if not t.name.startswith("asyncio_")]

        await eventually(lambda: not left() and len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_a_member_cut_off_alone_is_silent_and_fenced_when_it_returns(etcd: EtcdServer) -> None:
    async with Line(etcd.port) as line, members(etcd.registry, 1) as (watcher,):
        one = Seen(etcd.registry.replace(str(etcd.port), str(line.port)))
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        line.cut()
        await watcher.hears((NAME, 1, "silent"))
        assert not one.fenced.done()
        assert one.peers.numbers()["registry_presumed_silent"]
        line.mend()
        why, replaced = await asyncio.wait_for(one.fenced, 15.0)
        assert not replaced and "its lease lapsed" in why
        await one.peers.join(member(incarnation=2))
        await watcher.hears((NAME, 1, "gone"), (NAME, 2, "live"))
        await one.peers.leave()


async def test_values_that_are_no_records_are_ignored_and_counted(etcd: EtcdServer, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (marker,)

    bomb = pickle.dumps(Bomb())
    async with members(etcd.registry, 2) as (one, watcher), operator(etcd.registry) as (client, address):
        keys = [address.lives + b"prefill-7", address.beats + b"prefill-7", address.lives + b"../x\xff", address.everything]
        await client.put_if({}, [Put(key, bomb) for key in keys])
        await client.put_if({}, [Put(address.lives + f"big-{i}".encode(), bytes(MAX_BYTES * 8)) for i in range(2)])
        await one.peers.join(member())
        await watcher.hears((NAME, 1, "live"))
        mine = await client.get(address.life(NAME))
        assert mine is not None
        await client.put_if({}, [Put(address.life(NAME), bomb)])  # over a record that counts
        await watcher.shows("registry_refused_values", lambda n: n >= 4)
        one.peers.update(replace(member(), ready=False))
        await watcher.until(lambda: not watcher.known().member.ready)
        assert [c.member.id for c in watcher.peers.everybody()] == [NAME]
        assert not marker.exists()


async def test_the_list_says_silent_of_those_without_a_lease_where_nobody_is_left_to_judge(etcd: EtcdServer) -> None:
    async with operator(etcd.registry) as (client, address):
        await client.put_if({}, [Put(address.life(NAME), encode(MemberChange(member(), Liveness.LIVE)))])
        (change,) = await list_members(etcd.registry)
        assert (change.liveness, change.proof) == (Liveness.SILENT, "its lease lapsed")
    with pytest.raises(NoPath, match="does not answer"):
        await list_members("etcd://127.0.0.1:1/x")


async def test_many_large_values_are_read_in_pages(etcd: EtcdServer) -> None:
    async with operator(etcd.registry) as (client, address):
        for i in range(40):
            await client.put_if({}, [Put(address.lives + f"m-{i:02}".encode(), bytes(200_000))])
        items, _ = await client.read(address.everything)
        assert [item.key for item in items] == [address.lives + f"m-{i:02}".encode() for i in range(40)]
