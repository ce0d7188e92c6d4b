"""The tcp carrier where KV bytes are encrypted: what members exchange, and what others cannot do."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.carrier_peer import pattern, who

from moonpool.core.config import TransferConfig
from moonpool.core.errors import MoonpoolError, PeerSilent, TransferFailed
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.landing import Region
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.handshake import OFFER
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.sealing.stream import TAG_BYTES, Stream
from moonpool.kvstore.transfer import tcp_streams, tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.tcp_receiver import TcpReceiver
from moonpool.kvstore.transfer.tcp_sender import TcpSender
from moonpool.wire.frames import MAX_NOTICE_BYTES

SIZE = 4 << 20
KEY, OTHER = KvKey.of(bytes(range(32))), KvKey.of(bytes(32))


def rows(*pieces: tuple[int, int, int]) -> Pieces:
    """(offset, target, length) within memory 0 and region 0."""
    return np.array([(0, offset, 0, target, length) for offset, target, length in pieces], dtype=np.int64)


class Scene:
    """A receiver of one region in this process that holds ``KEY``."""

    def __init__(self, key: KvKey | None = KEY, hello_s: float = 2.0) -> None:
        self.notices: list[bytes] = []
        self.view = np.zeros(SIZE, np.uint8)
        self.receiver = TcpReceiver(who("store-b", "b"), self.notices.extend, hello_s=hello_s, key=key)
        self.receiver.register([Region(0, "", SIZE, 4096)], [self.view])

    def count(self, name: str) -> float:
        return self.receiver.numbers()[f"tcp_{name}"]

    def await_count(self, name: str, wanted: float) -> None:
        until = time.monotonic() + 20
        while self.count(name) < wanted:
            assert time.monotonic() < until, f"tcp_{name} stays at {self.count(name)}"
            time.sleep(0.01)


@pytest.fixture
def scene() -> Iterator[Scene]:
    one = Scene()
    yield one
    one.receiver.close()


@contextmanager
def sender(key: KvKey | None = KEY, **given: float) -> Iterator[TcpSender]:
    one = TcpSender(who("prefill-0", "a"), TransferConfig(), key=key, **given)
    one.register([pattern(SIZE)])
    try:
        yield one
    finally:
        one.close()


class Tap:
    """Between a sender and a receiver: keeps what went to the receiver, and may change it on its way."""

    def __init__(self, scene: Scene, change: Sequence[tuple[int, int]] = ()) -> None:
        address = tcp_wire.Address.decode(scene.receiver.describe().metadata)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._there = socket.create_connection((address.host, address.port), 5)
        self._changes = dict(change)
        self.seen = b""
        self.address = tcp_wire.Address(address.host, self._listener.getsockname()[1], address.token, address.admission)

    def run(self) -> None:
        """Until one side ends."""
        here, _ = self._listener.accept()
        with selectors.DefaultSelector() as ready, here, self._there:
            ready.register(here, selectors.EVENT_READ)
            ready.register(self._there, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    from_here = key.fileobj is here
                    try:
                        data = (here if from_here else self._there).recv(1 << 16)
                        if not data:
                            return
                        if from_here:
                            data = self._changed(data)
                            self.seen += data
                        (self._there if from_here else here).sendall(data)
                    except OSError:
                        return

    def _changed(self, data: bytes) -> bytes:
        out = bytearray(data)
        for at, flip in self._changes.items():
            if 0 <= at - len(self.seen) < len(out):
                out[at - len(self.seen)] ^= flip
        return bytes(out)


@contextmanager
def tapped(scene: Scene, change: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[Tap, Endpoint]]:
    tap = Tap(scene, change)
    thread = threading.Thread(target=tap.run, daemon=True)
    thread.start()
    try:
        yield tap, replace(scene.receiver.describe(), metadata=tap.address.encode())
    finally:
        tap._listener.close()
        thread.join(20)
        assert not thread.is_alive()


def test_members_push_bytes_that_nobody_between_them_can_read(scene: Scene) -> None:
    source = pattern(SIZE)
    pieces = rows((0, 4096, 3000), (1 << 20, 2 << 20, 1 << 20), (5000, 3, 1))
    notice = b"which landing, and whose prompt" * 40_000  # larger than one record
    notice = notice[:MAX_NOTICE_BYTES]
    with tapped(scene) as (tap, endpoint), sender() as one:
        one.push(endpoint, pieces, notice).result(20)
    want = np.zeros(SIZE, np.uint8)
    for _, offset, _, target, length in pieces.tolist():
        want[target : target + length] = source[offset : offset + length]
    assert (scene.view == want).all() and scene.notices == [notice]
    assert source[:64].tobytes() not in tap.seen and b"which landing" not in tap.seen and b"prefill-0" not in tap.seen
    token = tcp_wire.Address.decode(scene.receiver.describe().metadata).token
    assert token not in tap.seen  # what a hello carries is sealed, too


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bit_changed_anywhere_on_the_wire_ends_the_connection_and_no_notice_comes(data: st.DataObject) -> None:
    one_scene = Scene(hello_s=1.0)
    try:
        length = 3000
        fixed = (tcp_wire.HELLO.size, len("prefill-0"), tcp_wire.HEADER.size, 3 * tcp_wire.PIECE.itemsize)
        sealed = sum(size + TAG_BYTES for size in (*fixed, length, len(b"hello")))
        at = data.draw(st.integers(OFFER.size, OFFER.size + sealed - 1), "byte")
        with tapped(one_scene, [(at, 1 << data.draw(st.integers(0, 7), "bit"))]) as (_, endpoint), sender(stall_s=1) as one:
            with pytest.raises((TransferFailed, PeerSilent)):
                one.push(endpoint, rows((0, 8192, length)), b"hello").result(20)
        assert one_scene.notices == []
        one_scene.await_count("forged", 1)
        assert not one_scene.view[:8192].any() and not one_scene.view[8192 + length :].any()
    finally:
        one_scene.receiver.close()


def test_what_was_recorded_cannot_be_sent_again(scene: Scene) -> None:
    with tapped(scene) as (tap, endpoint), sender() as one:
        one.push(endpoint, rows((0, 0, 4096)), b"once").result(20)
    assert scene.notices == [b"once"]
    scene.view[:] = 0
    address = tcp_wire.Address.decode(scene.receiver.describe().metadata)
    with socket.create_connection((address.host, address.port), 5) as again:
        again.sendall(tap.seen)
        scene.await_count("forged", 1)
    assert scene.notices == [b"once"] and not scene.view.any()


def test_another_key_is_refused_with_both_names_and_no_key_is_refused(scene: Scene) -> None:
    endpoint = scene.receiver.describe()
    with sender(OTHER) as one, pytest.raises(TransferFailed, match=rf"kv key {OTHER.id} here, {KEY.id} at the peer"):
        one.push(endpoint, rows((0, 0, 10)), b"x").result(20)
    with sender(None) as one, pytest.raises(MoonpoolError):
        one.push(endpoint, rows((0, 0, 10)), b"x").result(20)
    assert not scene.view.any() and scene.notices == []
    plain = Scene(None, hello_s=0.2)
    try:
        with sender() as one, pytest.raises(MoonpoolError):  # a receiver that would take plain bytes gets none
            one.push(plain.receiver.describe(), rows((0, 0, 10)), b"x").result(20)
        assert not plain.view.any() and plain.notices == []
    finally:
        plain.receiver.close()


def test_whoever_holds_the_token_but_not_the_key_gets_nothing_in(scene: Scene) -> None:
    address = tcp_wire.Address.decode(scene.receiver.describe().metadata)
    with socket.create_connection((address.host, address.port), 5) as raw:
        raw.sendall(tcp_wire.encode_hello(address, Life(MemberId("raw"), Incarnation(7))))
        scene.await_count("malformed", 1)
    assert scene.count("connections") == 0


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=6, unique=True))
def test_records_open_in_their_order_and_meaning_alone(parts: list[bytes]) -> None:
    there, here = Stream(KEY.secret), Stream(KEY.secret)
    records = [there.seal(part, tcp_streams.BYTES) for part in parts]
    with pytest.raises(MoonpoolError):
        Stream(KEY.secret).open(records[0], tcp_streams.NOTICE)
    with pytest.raises(MoonpoolError):
        Stream(KEY.secret).open(records[1], tcp_streams.BYTES)
    assert [here.open(record, tcp_streams.BYTES) for record in records] == parts
    with pytest.raises(MoonpoolError):
        here.open(records[-1], tcp_streams.BYTES)


def test_no_nonce_comes_twice_under_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.kvstore.sealing.stream.MAX_RECORDS", 3)
    one = Stream(KEY.secret)
    sealed = [one.seal(b"same", b"") for _ in range(3)]
    assert len(set(sealed)) == 3
    with pytest.raises(TransferFailed, match="the connection is made anew"):
        one.seal(b"same", b"")
