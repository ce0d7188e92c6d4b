"""The tcp carrier's wire gone wrong: decoders one by one, then whole conversations with a living receiver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.carrier_peer import pattern, who
from support.mutations import each, fuzzing, mutated, stands

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, MoonpoolError
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.claims import Life
from moonpool.kvstore.sealing.handshake import Handshake
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.kvstore.transfer.pieces import endpoint_extents
from moonpool.kvstore.transfer.tcp_receiver import TcpReceiver
from moonpool.kvstore.transfer.tcp_sender import TcpSender

SIZE = 1 << 20
KEY = KvKey.of(bytes(range(32)))
ADDRESS = tcp_wire.Address("127.0.0.1", 4711, bytes(32), 0)
RAW = Life(MemberId("raw"), Incarnation(7))
PIECES = np.array([(0, 0, 0, 4096, 64), (0, 64, 0, 8192, 32)], dtype=np.int64)
MESSAGE = tcp_wire.encode_message(1, PIECES, b"notice", last=True)


@fuzzing(60)
@given(mutated(ADDRESS.encode(), tcp_wire.encode_hello(ADDRESS, RAW), MESSAGE, tcp_wire.encode_welcome(), Handshake(KEY).offer))
def test_what_stands_on_the_wire(data: bytes) -> None:
    """Fixed parts are read in full before they are decoded, so their lengths are right."""

    def fixed(size: int) -> bytes:
        return data[:size].ljust(size, b"\0")

    each([tcp_wire.Address.decode], data)
    stands(lambda: tcp_wire.Hello.decode(fixed(tcp_wire.HELLO.size)))
    stands(lambda: tcp_wire.Header.decode(fixed(tcp_wire.HEADER.size)))
    stands(lambda: tcp_wire.require_welcome(fixed(tcp_wire.WELCOME.size)))
    stands(lambda: tcp_wire.life_of(tcp_wire.Hello(bytes(32), 0, Incarnation(1), len(data)), data))
    stands(lambda: Handshake(KEY).meet(fixed(len(Handshake(KEY).offer)), caller=False))


@fuzzing(50)
@given(st.lists(st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 62)), max_size=4), st.integers(0, 5))
def test_endpoints_that_say_something_odd(regions: list[tuple[int, int]], bases: int) -> None:
    endpoint = Endpoint(
        NodeId("b"), Incarnation(1), 1, "ucx", "x", b"", (1,) * bases, tuple(Region(n, "", size, 1) for n, size in regions)
    )
    with pytest.raises(MoonpoolError) if len(regions) != bases else _any():
        endpoint_extents(endpoint)


class _any:
    """Either a value, or what was promised for a number out of range."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, Bug)


class Scene:
    def __init__(self, key: KvKey | None) -> None:
        self.key = key
        self.notices: list[bytes] = []
        self.view = np.zeros(SIZE, np.uint8)
        self.receiver = TcpReceiver(who("store-b", "b"), self.notices.extend, key=key, hello_s=0.2)
        self.receiver.register([Region(0, "", SIZE, 4096)], [self.view])

    @property
    def address(self) -> tcp_wire.Address:
        return tcp_wire.Address.decode(self.receiver.describe().metadata)

    def serves(self) -> bool:
        """A member's push still works."""
        one = TcpSender(who("prefill-0", "a"), TransferConfig(), key=self.key)
        try:
            one.register([pattern(SIZE)])
            one.push(self.receiver.describe(), PIECES, b"from a member").result(20)
        finally:
            one.close()
        return self.notices[-1] == b"from a member"


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    one = Scene(request.param)
    yield one
    one.receiver.close()


@fuzzing(40)
@given(data=st.data())
def test_conversations(scene: Scene, data: st.DataObject) -> None:
    """Whatever a stranger sends, or a member gone mad: its connection ends, no other byte or thread suffers."""
    hello = tcp_wire.encode_hello(scene.address, RAW) if scene.key is None else Handshake(KEY).offer
    raw = data.draw(mutated(hello + MESSAGE + bytes(96) + b"notice", hello, MESSAGE), "sent")
    failed: list[object] = []
    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        with socket.create_connection((scene.address.host, scene.address.port), 5) as stranger:
            stranger.settimeout(5)
            try:
                stranger.sendall(raw)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except OSError:
                pass
        assert scene.serves()
    finally:
        threading.excepthook = hook
    assert not failed
    assert scene.key is None or set(scene.notices) == {b"from a member"}
