"""Whoever speaks to the node's unix socket: in frames, in garbage, too much, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store import LAYOUT, Roll, config, member, until

from moonpool.core.config import MIB
from moonpool.core.errors import MoonpoolError, PeerSilent
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.use import Use
from moonpool.kvstore import Put, SyncStoreClient
from moonpool.kvstore.claims import Life
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.library import host_calls, host_face
from moonpool.kvstore.library.host_calls import HostCalls, Layouts
from moonpool.kvstore.library.host_link import HostLink
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.node_sessions import NodeSession
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Kind, Link, Wanted


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[StoreNode]:
    me = member("store-a", Role.STORE, "a")
    node = await StoreNode.start(config(folder, store={"pool_bytes": 16 * MIB, "region_bytes": 16 * MIB}), me, LAYOUT, Roll())
    try:
        yield node
    finally:
        await node.close()


def path_of(node: StoreNode) -> Path:
    assert node.host_face is not None
    return node.host_face.path


@asynccontextmanager
async def caller(node: StoreNode) -> AsyncIterator[tuple[socket.socket, Callable[[bytes], Awaitable[bytes]]]]:
    """A bare connection, and a way to send one message and hear the answer (empty: hung up)."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        connection.connect(str(path_of(node)))

        async def ask(message: bytes) -> bytes:
            await loop.sock_sendall(connection, message)
            return await asyncio.wait_for(loop.sock_recv(connection, frames.MAX_FRAME_BYTES), 10)

        yield connection, ask


def kind_of(answer: bytes) -> Kind:
    return frames.head(memoryview(answer)).kind


@asynccontextmanager
async def linked(node: StoreNode, client: int = 1) -> AsyncIterator[HostLink]:
    link = await asyncio.to_thread(HostLink.open, path_of(node), client, "t")
    try:
        yield link
    finally:
        link.close()


async def test_the_socket_is_this_users_alone_and_goes_with_the_node(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        path = path_of(node)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_process_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(tmp_path) as node:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        async with caller(node) as (_, ask):
            assert not await _or_nothing(ask(frames.encode_hello(1, frames.Hello(1, "t"))))
        monkeypatch.undo()
        assert node.numbers()["library_refused"] == 1


async def _or_nothing(answer: Awaitable[bytes]) -> bytes:
    try:
        return await answer
    except OSError:
        return b""


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        b"cos\nsystem\n(S'touch marker'\ntR.",  # what would run a command, were it unpickled
        frames.encode_keys(Kind.EXISTS, 1, [bytes(16)]),
        frames.encode_hello(1, frames.Hello(1, "t")).replace(b"mpst", b"mpxx"),
        bytes(frames.MAX_FRAME_BYTES),
    ],
    ids=["short", "pickle", "no hello", "wrong magic", "zeros"],
)
async def test_what_does_not_begin_with_a_hello_is_counted_and_hung_up(tmp_path: Path, message: bytes) -> None:
    async with started(tmp_path) as node:
        async with caller(node) as (connection, ask):
            assert kind_of(await ask(message)) is Kind.ERROR
            assert await asyncio.get_running_loop().sock_recv(connection, 10) == b""
        assert node.numbers()["library_malformed"] == 1
        assert node.numbers()["library_clients"] == 0
        assert node.numbers()["sessions"] == 0


async def test_a_malformed_frame_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    reserve = frames.encode_reserve(1, None, [Wanted(b"k" * 16, 3, Link.NONE)])
    bad = [
        reserve[:-1],
        reserve.replace(b"\x03\x00\x00", b"\x03\x00\x09"),
        frames.encode_reserve(1, None, [Wanted(b"k" * 16, 999, Link.NONE)]),
        frames.encode_keys(Kind.PIN, 1, [b"k" * 16], word=77),
        frames.encode_keys(Kind.FETCH, 1, []),
        frames.encode_error(1, PeerSilent("me")),
    ]
    async with started(tmp_path) as node, linked(node, 99) as other:
        for i, message in enumerate(bad):
            async with caller(node) as (connection, ask):
                assert kind_of(await ask(frames.encode_hello(1, frames.Hello(i, "t")))) is Kind.HELLO
                assert kind_of(await ask(message)) is Kind.ERROR
                assert await asyncio.get_running_loop().sock_recv(connection, 10) == b""
        assert node.numbers()["library_malformed"] == len(bad)
        assert node.pool.numbers()["reservations"] == 0
        await asyncio.to_thread(other.ask, frames.encode_keys(Kind.EXISTS, 1, [b"k" * 16]))


async def test_who_connects_and_says_nothing_is_hung_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_face, "HELLO_S", 0.1)
    async with started(tmp_path) as node, caller(node) as (connection, _):
        answer = asyncio.get_running_loop().sock_recv(connection, 10)
        assert await asyncio.wait_for(answer, 10) == b""


async def test_who_does_not_read_is_not_waited_for_and_fills_no_memory(tmp_path: Path) -> None:
    question = frames.encode_keys(Kind.EXISTS, 1, [bytes(16)] * frames.MAX_ITEMS)
    async with started(tmp_path) as node, caller(node) as (connection, ask), linked(node, 2) as other:
        await ask(frames.encode_hello(1, frames.Hello(1, "t")))
        with pytest.raises(TimeoutError):
            await _ask_on(connection, question)
        assert node.host_face is not None
        assert max(len(one.unsent) for one in node.host_face._callers) == 1
        await asyncio.to_thread(other.ask, frames.encode_keys(Kind.EXISTS, 1, [b"k" * 16]))
        connection.setblocking(True)
        answers = await asyncio.to_thread(_read_all, connection, 20)
        assert set(answers) == {Kind.EXISTS}


async def _ask_on(connection: socket.socket, question: bytes) -> None:
    """TimeoutError when nothing more is taken."""
    while True:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, question), 0.3)


def _read_all(connection: socket.socket, n: int) -> list[Kind]:
    """The next ``n`` answers: it goes on where it was stopped."""
    return [kind_of(connection.recv(frames.MAX_FRAME_BYTES)) for _ in range(n)]


async def test_an_end_of_a_pin_counts_once_and_for_its_own_session_only(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        with await asyncio.to_thread(SyncStoreClient.connect, tmp_path) as client:
            assert await asyncio.to_thread(client.put, "v", b"x") is Put.STORED
            key = client.key("v")
            async with linked(node, 1) as one, linked(node, 2) as other:

                def open_(link: HostLink) -> int:
                    head, frame = link.ask(frames.encode_keys(Kind.OPEN, link.number(), [key]))
                    return frames.decode_opened(frame, head.items)[0]

                def end(link: HostLink, *tickets: int) -> int:
                    _, frame = link.ask(frames.encode_ids(Kind.UNPIN, link.number(), tickets))
                    return frames.decode_count(frame)

                first, second = await asyncio.to_thread(open_, one), await asyncio.to_thread(open_, one)
                assert node.pool.numbers()["pins"] == 2
                assert await asyncio.to_thread(end, other, first) == 0
                assert await asyncio.to_thread(end, one, first, first) == 1
                assert await asyncio.to_thread(end, one, first) == 0
                assert node.pool.numbers()["pins"] == 1
                assert await asyncio.to_thread(client.remove, "v") == 0  # somebody reads it
                assert await asyncio.to_thread(end, one, second) == 1
                assert await asyncio.to_thread(client.remove, "v") == 1
        assert node.pool.numbers()["unpins_ignored"] == 3


async def test_pins_end_with_the_connection(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        with await asyncio.to_thread(SyncStoreClient.connect, tmp_path) as client:
            await asyncio.to_thread(client.put, "v", b"x")
            async with linked(node) as link:
                await asyncio.to_thread(link.ask, frames.encode_keys(Kind.OPEN, 1, [client.key("v")]))
                assert node.pool.numbers()["pins"] == 1
            await until(lambda: node.pool.numbers()["pins"] == 0, "the pin ended")


async def test_what_a_broken_connection_was_writing_stays_fenced_until_its_client_is_back(tmp_path: Path) -> None:
    """The process lives on: only its own return, as a newer life, proves that it writes no more."""
    ask = frames.encode_reserve(1, None, [Wanted(b"k" * 16, 0, Link.NONE)])
    async with started(tmp_path) as node:
        async with linked(node, 7) as link:
            await asyncio.to_thread(link.ask, ask)
        await until(lambda: node.pool.numbers()["slots_fenced"] == 1, "fenced")
        assert node.numbers()["pidfds"] == 1
        async with linked(node, 8) as other:  # another client of this process proves nothing
            assert node.pool.numbers()["slots_fenced"] == 1
            head, frame = await asyncio.to_thread(other.ask, ask)
            assert frames.decode_granted(frame, head.items)[0].state == 0  # the key is free for others at once
        async with linked(node, 7):
            assert node.pool.numbers()["slots_fenced"] == 1  # that of client 8, which left in the middle, too
        await until(lambda: node.numbers()["sessions"] == 0, "all sessions ended")
        async with linked(node, 8):
            assert node.pool.numbers()["slots_fenced"] == 0
        await until(lambda: node.numbers()["pidfds"] == 0, "nobody is watched any more")


async def test_a_node_that_leaves_ends_its_connections(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        link = await asyncio.to_thread(HostLink.open, path_of(node), 1, "t")
    with pytest.raises(PeerSilent, match="is over"):
        await asyncio.to_thread(link.ask, frames.encode_keys(Kind.EXISTS, 1, []))


class Bare:
    """As much of a store node as calls on its pool need."""

    def __init__(self) -> None:
        self.pool = Pool(NodeId("a"), Incarnation(1), SlotMap([4 * MIB]), Lru())
        self.clock = time.monotonic
        self.leaving = SimpleNamespace(begun=False)
        self.regions = SimpleNamespace(files=[])
        self.peers = Roll()
        self.member = member("store-a", Role.STORE, "a")

    def changed(self) -> None:
        self.pool.take_events()


keys = st.integers(0, 12).map(lambda i: bytes([i]) * 16)
wanted = st.builds(Wanted, keys, st.integers(0, 10), st.sampled_from(Link))
questions = st.one_of(
    st.binary(max_size=80).map(lambda raw: frames.encode_keys(Kind.OPEN, 1, [])[: frames.HEAD_BYTES] + raw),
    st.builds(lambda kind, raw: bytes([kind]) + raw[1:], st.integers(1, 15), st.just(frames.encode_ids(Kind.SEAL, 1, [1, 2]))),
    st.builds(lambda parent, blocks: frames.encode_reserve(1, parent, blocks), keys, st.lists(wanted, max_size=6)),
    st.builds(
        lambda kind, asked, word: frames.encode_keys(kind, 1, asked, word=word),
        st.sampled_from([Kind.EXISTS, Kind.LOOKUP, Kind.PIN, Kind.OPEN, Kind.REMOVE]),
        st.lists(keys, max_size=6),
        st.integers(0, 10),
    ),
    st.builds(
        lambda kind, ids: frames.encode_ids(kind, 1, ids),
        st.sampled_from([Kind.SEAL, Kind.ABANDON, Kind.UNPIN]),
        st.lists(st.integers(0, 40), max_size=6),
    ),
    keys.map(lambda key: frames.encode_quarantine(1, key, 0, "here")),
)


@settings(max_examples=200)
@given(st.lists(questions, max_size=12))
def test_any_questions_in_any_order_are_answered_or_refused_and_leave_the_books_right(asked: list[bytes]) -> None:
    node: Any = Bare()
    life = Life(MemberId("client-1"), Incarnation(1))
    calls = HostCalls(node, NodeSession(1, life, 0.0, False), Use("t"), Layouts(node.pool.register), lambda *_: None)
    for question in asked:
        view = memoryview(question)
        with contextlib.suppress(MoonpoolError):
            answer = calls.answer(frames.head(view), view)
            assert answer is not None
            frames.head(memoryview(answer))
    node.pool.session_ended(1, 0.0)
    node.pool.writer_gone(life, 0.0)
    node.pool.clear()
    numbers = node.pool.numbers()
    assert (numbers["pins"], numbers["reservations"], numbers["tickets"]) == (0, 0, 0)
    assert numbers["pool_free_bytes"] == numbers["pool_bytes"]


def test_items_of_a_frame_are_reserved_in_runs_that_hang_together() -> None:
    none, parent, before, tied = Link.NONE, Link.PARENT, Link.BEFORE, Link.TIED
    for links, runs in (
        ([none], [(0, 1, none)]),
        ([parent], [(0, 1, before)]),
        ([none, none, none], [(0, 3, none)]),
        ([none, none, tied, tied, none], [(0, 1, none), (1, 4, tied), (4, 5, none)]),
        ([none, tied, none, tied], [(0, 2, tied), (2, 4, tied)]),
        ([parent, before, before, none], [(0, 3, before), (3, 4, none)]),
        ([parent, none, parent], [(0, 1, before), (1, 2, none), (2, 3, before)]),
        ([none, before, tied], [(0, 2, before), (2, 3, before)]),
    ):
        assert list(host_calls._runs([Wanted(bytes(16), 0, link) for link in links])) == runs
    other_sizes = [Wanted(bytes(16), size, none) for size in (0, 0, 1, 1, 0)]
    assert list(host_calls._runs(other_sizes)) == [(0, 2, none), (2, 4, none), (4, 5, none)]


async def test_tied_blocks_that_could_never_fit_evict_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as node, linked(node) as link:
        with await asyncio.to_thread(SyncStoreClient.connect, tmp_path) as client:
            values = [(f"v{i}", bytes(1 << 20)) for i in range(10)]
            assert set(await asyncio.to_thread(client.put_many, values)) == {Put.STORED}
        links = [Link.NONE, *[Link.TIED] * 16]
        wanted = [Wanted(i.to_bytes(16, "big"), 8, link) for i, link in enumerate(links)]
        head, frame = await asyncio.to_thread(link.ask, frames.encode_reserve(link.number(), None, wanted))
        assert {frames.STATES[one.state] for one in frames.decode_granted(frame, head.items)} == {"full"}
        assert len(node.pool.held.index) == 10
