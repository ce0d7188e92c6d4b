"""Plain sockets where they go wrong: strangers at the port, peers that stop half way, connections that are cut."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.carrier_peer import pattern, sending_peer, to_json, who
from support.toll_gate import Toll, TollGate

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError, InvalidRequest, PeerSilent, TransferFailed
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.tcp_receiver import MAX_CONNECTIONS, MAX_STRANGERS, TcpReceiver
from moonpool.kvstore.transfer.tcp_sender import TcpSender

SIZE = 8 << 20
RAW = Life(MemberId("raw"), Incarnation(7))


def rows(*pieces: tuple[int, int, int]) -> Pieces:
    """(offset, target, length) within memory 0 and region 0."""
    return np.array([(0, offset, 0, target, length) for offset, target, length in pieces], dtype=np.int64)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"never came true: {what}")


class Scene:
    """A receiver of one region in this process."""

    def __init__(self, hello_s: float = 2.0) -> None:
        self.notices: list[bytes] = []
        self.view = np.zeros(SIZE, np.uint8)
        self.receiver = TcpReceiver(who("store-b", "b"), self.notices.extend, hello_s=hello_s)
        self.receiver.register([Region(0, "", SIZE, 4096)], [self.view])

    @property
    def address(self) -> tcp_wire.Address:
        return tcp_wire.Address.decode(self.receiver.describe().metadata)

    def count(self, name: str) -> float:
        return self.receiver.numbers()[f"tcp_{name}"]

    def dial(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), 5)

    def enter(self, address: tcp_wire.Address | None = None) -> socket.socket:
        """A connection that said hello and was welcomed."""
        raw = self.dial()
        raw.sendall(tcp_wire.encode_hello(address or self.address, RAW))
        tcp_wire.require_welcome(raw.recv(tcp_wire.WELCOME.size, socket.MSG_WAITALL))
        return raw


@pytest.fixture
def scene() -> Iterator[Scene]:
    one = Scene()
    yield one
    one.receiver.close()


@contextmanager
def sender(**given: float) -> Iterator[TcpSender]:
    one = TcpSender(who("prefill-0", "a"), TransferConfig(), **given)
    one.register([pattern(SIZE)])
    try:
        yield one
    finally:
        one.close()


def is_closed(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except ConnectionError:
        return True


def opening_pickle(path: Path) -> bytes:
    """A pickle that makes the file ``path`` when it is loaded."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()


def header(**given: int) -> bytes:
    values = {"magic": tcp_wire.MAGIC, "version": 1, "flags": 1, "number": 1, "pieces": 0, "frame": 0} | given
    return tcp_wire.HEADER.pack(*values.values())


def test_what_is_no_hello_of_ours_is_closed_and_counted_and_does_nothing_else(scene: Scene, tmp_path: Path) -> None:
    good = tcp_wire.encode_hello(scene.address, RAW)
    bad = [
        opening_pickle(tmp_path / "marker").ljust(tcp_wire.HELLO.size, b"."),
        np.random.default_rng(3).bytes(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: somebody with patience\r\n\r\n",
        tcp_wire.HELLO.pack(tcp_wire.MAGIC, 2, scene.address.token, 0, 1, 4) + b"late",
        tcp_wire.HELLO.pack(tcp_wire.MAGIC, 1, scene.address.token, 0, 1, 0),
        tcp_wire.HELLO.pack(tcp_wire.MAGIC, 1, scene.address.token, 0, 1, 3) + b"\xff\xff\xff",
    ]
    for data in bad:
        with scene.dial() as raw:
            raw.sendall(data)
            assert is_closed(raw)
    wait_for(lambda: scene.count("malformed") == len(bad), "all of them counted")
    for wrong in (
        good.replace(scene.address.token, bytes(32)),
        tcp_wire.encode_hello(replace(scene.address, admission=1), RAW),
    ):
        with scene.dial() as raw:
            raw.sendall(wrong)
            assert is_closed(raw)
    wait_for(lambda: scene.count("refused") == 2, "two without a valid token")
    assert not scene.view.any() and not scene.notices and not (tmp_path / "marker").exists()
    with sender() as one:
        one.push(scene.receiver.describe(), rows((0, 0, 64)), b"x").result(5)
    assert scene.notices == [b"x"]


@pytest.mark.parametrize(
    "message",
    [
        header(magic=b"XXXX"),
        header(version=9),
        header(pieces=tcp_wire.MAX_PIECES + 1),
        header(frame=(1 << 20) + 1),
        header(pieces=1) + struct.pack("<3q", 0, SIZE - 10, 11),
        header(pieces=1) + struct.pack("<3q", 1, 0, 8),
        header(pieces=1) + struct.pack("<3q", 0, -8, 8),
        header(pieces=1) + struct.pack("<3q", 0, 0, -8),
        header(pieces=1) + struct.pack("<3q", 0, 8, (1 << 63) - 1),
        header(pieces=1) + struct.pack("<3q", -1, 0, 8),
    ],
)
def test_a_message_that_breaks_the_rules_ends_its_connection_before_a_byte_of_it_lands(scene: Scene, message: bytes) -> None:
    with scene.enter() as raw:
        raw.sendall(message + b"\x55" * 64)
        assert is_closed(raw)
    wait_for(lambda: scene.count("malformed") == 1, "it is counted")
    assert not scene.view.any() and not scene.notices


def test_a_peer_that_trickles_its_hello_is_dropped_in_time() -> None:
    scene = Scene(hello_s=0.3)
    hello = tcp_wire.encode_hello(scene.address, RAW)
    begun = time.monotonic()
    with scene.dial() as raw:
        raw.settimeout(0.05)
        for i in range(100):
            try:
                raw.sendall(hello[i % 8 : i % 8 + 1] if i else hello[:1])
                if is_closed(raw):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() - begun < 2.0
    wait_for(lambda: scene.count("connections") == 0, "its thread is gone")
    scene.receiver.close()


def test_a_crowd_that_says_nothing_is_bounded_and_does_not_keep_a_peer_out() -> None:
    scene = Scene(hello_s=60.0)
    crowd = [scene.dial() for _ in range(200)]
    try:
        with sender() as one:
            one.push(scene.receiver.describe(), rows((0, 0, 4096)), b"x").result(5)
        wait_for(lambda: scene.count("connections") <= MAX_STRANGERS + 1, "the oldest of the crowd are gone")
    finally:
        for raw in crowd:
            raw.close()
        scene.receiver.close()


def test_more_peers_than_there_are_places_are_refused_and_served_once_some_have_left(scene: Scene) -> None:
    peers = [scene.enter() for _ in range(MAX_CONNECTIONS)]
    with sender() as one, pytest.raises(TransferFailed):
        one.push(scene.receiver.describe(), rows((0, 0, 64)), b"x").result(5)
    for raw in peers:
        raw.close()
    wait_for(lambda: scene.count("connections") == 0, "they have left")
    with sender() as one:
        one.push(scene.receiver.describe(), rows((0, 0, 64)), b"x").result(5)


def half_a_push(scene: Scene, address: tcp_wire.Address | None = None) -> socket.socket:
    """A sender that stops after half of its bytes: 0x55 in the first megabyte."""
    raw = scene.enter(address)
    raw.sendall(header(pieces=1) + struct.pack("<3q", 0, 0, 2 << 20) + b"\x55" * (1 << 20))
    wait_for(lambda: bool(scene.view[(1 << 20) - 1]), "the first half is in place")
    return raw


async def test_the_next_life_may_begin_at_any_moment_of_a_connection(scene: Scene) -> None:
    over = threading.Event()

    def strangers() -> None:
        while not over.is_set():
            with suppress(OSError):
                scene.dial().close()

    crowd = [threading.Thread(target=strangers) for _ in range(2)]
    for one in crowd:
        one.start()
    try:
        for _ in range(300):
            await scene.receiver.remake()
    finally:
        over.set()
        for one in crowd:
            one.join()


@pytest.mark.parametrize("how", ["cut", "remake"])
async def test_nothing_lands_of_a_sender_that_stopped_half_way_once_it_was_cut_off(scene: Scene, how: str) -> None:
    raw = await asyncio.to_thread(half_a_push, scene)
    if how == "cut":
        assert await scene.receiver.cut(RAW)
    else:
        await scene.receiver.remake()
    scene.view[:] = 0
    with raw, pytest.raises(ConnectionError):
        raw.sendall(b"\x55" * (100 << 20))
    assert not scene.view.any() and scene.count("broken") == 1


async def test_a_sender_that_goes_on_sending_is_cut_off_all_the_same(scene: Scene) -> None:
    raw = await asyncio.to_thread(scene.enter)
    stop = threading.Event()
    message = header(pieces=1) + struct.pack("<3q", 0, 0, 1 << 20) + b"\x55" * (1 << 20)

    def send() -> None:
        with suppress(ConnectionError):
            while not stop.is_set():
                raw.sendall(message)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        await asyncio.to_thread(wait_for, lambda: bool(scene.view[0]), "it has begun")
        assert await asyncio.wait_for(scene.receiver.cut(RAW), 5)
        scene.view[:] = 0
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive() and not scene.view.any()
    finally:
        stop.set()
        raw.close()
        thread.join()


async def test_cutting_one_sender_off_leaves_the_others_connected_and_it_comes_back_by_name_only(scene: Scene) -> None:
    before = scene.address
    raw = await asyncio.to_thread(half_a_push, scene)
    with sender() as one:
        target = scene.receiver.describe()
        await asyncio.wrap_future(one.push(target, rows((0, 4 << 20, 64)), b"1"))
        assert await scene.receiver.cut(RAW)
        assert await asyncio.to_thread(is_closed, raw)
        await asyncio.wrap_future(one.push(target, rows((0, 4 << 20, 64)), b"2"))  # over the connection it had
        assert scene.notices == [b"1", b"2"]
    for old in (before, scene.address):
        with scene.dial() as again:
            again.sendall(tcp_wire.encode_hello(old, RAW))
            assert await asyncio.to_thread(is_closed, again)
    scene.enter(tcp_wire.Address.decode(scene.receiver.describe(RAW).metadata)).close()
    assert scene.receiver.describe(RAW).agent_name != scene.receiver.describe().agent_name
    raw.close()


async def test_a_process_frozen_in_the_middle_of_its_pushes_cannot_write_after_it_was_cut_off(scene: Scene) -> None:
    with sending_peer("tcp", SIZE) as other:
        target = to_json(scene.receiver.describe())
        await asyncio.to_thread(other.ask, "connect", target=target)
        await asyncio.to_thread(other.ask, "push", target=target, rows=[[0, 0, 0, 0, SIZE]], frame="00", times=300)
        other.process.send_signal(signal.SIGSTOP)
        (writer,) = scene.receiver.writers()
        assert await scene.receiver.cut(writer)
        assert scene.receiver.writers() == set()
        scene.view[:] = 0
        other.process.send_signal(signal.SIGCONT)
        assert "TransferFailed" in set(await asyncio.to_thread(other.ask, "ends"))
        assert not scene.view.any()
        assert other.end() == 0


HELLO = tcp_wire.HELLO.size + len("prefill-0")
WELCOME, ANSWER = tcp_wire.WELCOME.size, tcp_wire.ANSWER.size


@pytest.mark.parametrize(
    ("toll", "error"),
    [
        (Toll(up=0), "TransferFailed"),  # accepted, and closed at once
        (Toll(up=HELLO // 2), "TransferFailed"),
        (Toll(down=WELCOME // 2), "TransferFailed"),
        (Toll(up=0, silent=True), "PeerSilent"),  # accepted, and never heard of again
        (Toll(down=WELCOME // 2, silent=True), "PeerSilent"),
        (Toll(up=HELLO + 10), "TransferFailed"),  # in the middle of the first header
        (Toll(up=HELLO + 1_000_000), "TransferFailed"),  # in the middle of its bytes
        (Toll(up=HELLO + 1_000_000, silent=True), "PeerSilent"),
        (Toll(down=WELCOME), "TransferFailed"),  # all bytes arrived, the answer does not
        (Toll(down=WELCOME + ANSWER // 2, silent=True), "PeerSilent"),
    ],
    ids=str,
)
def test_a_connection_that_breaks_anywhere_fails_its_push_within_two_seconds_and_the_next_one_works(
    scene: Scene, toll: Toll, error: str
) -> None:
    with TollGate(scene.address.host, scene.address.port, toll) as gate, sender(stall_s=0.4, connect_s=0.4) as one:
        real = scene.receiver.describe()
        target = replace(real, metadata=replace(scene.address, port=gate.port).encode())
        begun = time.monotonic()
        failed = one.push(target, rows((0, 0, 4 << 20)), b"1").exception(10)
        assert type(failed).__name__ == error
        assert time.monotonic() - begun < 2.0
        assert type(one.push(target, rows((0, 0, 64)), b"2").exception(10)).__name__ == error  # refused until connected anew
        one.connect(target).result(10)
        one.push(target, rows((0, 0, 4 << 20)), b"3").result(10)
        assert scene.notices[-1] == b"3"
        assert (scene.view[: 4 << 20] == pattern(SIZE)[: 4 << 20]).all()


def test_other_targets_are_served_while_one_does_not_answer(scene: Scene) -> None:
    with TollGate(scene.address.host, scene.address.port, Toll(up=0, silent=True)) as gate, sender(connect_s=0.4) as one:
        real = scene.receiver.describe()
        deaf = replace(real, agent_name="deaf", metadata=replace(scene.address, port=gate.port).encode())
        stuck = one.push(deaf, rows((0, 0, 64)), b"stuck")
        one.push(real, rows((0, 0, 64)), b"x").result(5)
        assert not stuck.done()
        assert isinstance(stuck.exception(5), PeerSilent)


def test_an_answer_out_of_turn_ends_the_connection(scene: Scene) -> None:
    """By a peer that is no node of ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener, sender() as one:
        port = listener.getsockname()[1]
        target = replace(scene.receiver.describe(), metadata=replace(scene.address, port=port).encode())
        pushed = one.push(target, rows((0, 0, 64)), b"x")
        raw, _ = listener.accept()
        with raw:
            raw.sendall(tcp_wire.encode_welcome() + tcp_wire.ANSWER.pack(99))
            with pytest.raises(TransferFailed, match="not its turn"):
                pushed.result(5)


def test_a_node_whose_notices_fail_still_answers_and_serves_on() -> None:
    class Lost(Exception):
        pass

    def fail(frames: Sequence[bytes]) -> None:
        raise Lost

    view = np.zeros(SIZE, np.uint8)
    receiver = TcpReceiver(who("store-b", "b"), fail)
    receiver.register([Region(0, "", SIZE, 4096)], [view])
    with sender() as one:
        for _ in range(2):
            one.push(receiver.describe(), rows((0, 0, 64)), b"x").result(5)
    receiver.close()


def test_a_host_that_is_not_ours_is_a_configuration_error() -> None:
    member = replace(who("store-b", "b"), address="192.0.2.7:7000")
    with pytest.raises(ConfigError, match=r"no port can be bound on '192\.0\.2\.7'"):
        TcpReceiver(member, lambda frames: None).register([], [])


def test_a_chosen_port_is_taken_and_one_that_is_not_free_is_named() -> None:
    first = TcpReceiver(who("store-b", "b"), lambda frames: None)
    first.register([Region(0, "", SIZE, 4096)], [np.zeros(SIZE, np.uint8)])
    port = tcp_wire.Address.decode(first.describe().metadata).port
    with pytest.raises(ConfigError, match=rf"transfer\.port: cannot listen on .*:{port}"):
        TcpReceiver(who("store-b", "b"), lambda frames: None, port=port).register([], [])
    first.close()
    again = TcpReceiver(who("store-b", "b"), lambda frames: None, port=port)
    again.register([Region(0, "", SIZE, 4096)], [np.zeros(SIZE, np.uint8)])
    assert tcp_wire.Address.decode(again.describe().metadata).port == port
    again.close()


def test_metadata_that_is_no_address_fails_the_push() -> None:
    with sender() as one:
        for bad in (b"", b"x" * 10, bytes(38) + b"\xff\xff", bytes(5000)):
            target = Endpoint(NodeId("b"), Incarnation(1), 1, "tcp", f"n{len(bad)}", bad, (0,), (Region(0, "", SIZE, 4096),))
            with pytest.raises(TransferFailed):
                one.push(target, rows((0, 0, 64)), b"x").result(5)


def test_a_push_of_more_pieces_than_one_message_holds_lands_whole(scene: Scene) -> None:
    count = tcp_wire.MAX_PIECES + 3
    pieces = np.zeros((count, 5), dtype=np.int64)
    pieces[:, 1], pieces[:, 3], pieces[:, 4] = np.arange(count) * 4, np.arange(count) * 8, 3
    with sender() as one:
        one.push(scene.receiver.describe(), pieces, b"x").result(20)
    want = np.zeros(SIZE, np.uint8)
    for i in range(3):
        want[i : count * 8 : 8] = pattern(SIZE)[i : count * 4 : 4]
    assert (scene.view == want).all() and scene.notices == [b"x"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=40),
    st.binary(max_size=300),
    st.integers(0, (1 << 64) - 1),
    st.booleans(),
)
def test_a_message_is_read_as_it_was_written(table: list[tuple[int, int, int]], frame: bytes, number: int, last: bool) -> None:
    pieces = np.array([(0, 0, *row) for row in table], dtype=np.int64).reshape(-1, 5)
    data = tcp_wire.encode_message(number, pieces, frame, last=last)
    head = tcp_wire.Header.decode(data[: tcp_wire.HEADER.size])
    assert head == tcp_wire.Header(last, number, len(table), len(frame))
    assert tcp_wire.decode_table(data[tcp_wire.HEADER.size :]).tolist() == [list(row) for row in table]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    for decode, size in ((tcp_wire.Hello.decode, tcp_wire.HELLO.size), (tcp_wire.Header.decode, tcp_wire.HEADER.size)):
        try:
            decode(data[:size].ljust(size, b"\0"))
        except InvalidRequest:
            pass
    try:
        assert tcp_wire.Address.decode(data).encode() == data
    except InvalidRequest:
        pass
