"""What every carrier between processes does alike, over loopback, the other end in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.carrier_peer import from_json, map_file, pattern, receiver_of, receiving_peer, sending_peer, to_json, who

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, PeerSilent, TransferFailed
from moonpool.core.landing import Region
from moonpool.core.layout import KVLayout
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces, Sender
from moonpool.kvstore.transfer.tcp_sender import TcpSender
from moonpool.kvstore.transfer.ucx_sender import UcxSender
from moonpool.kvstore.transfer.ucxx_sender import UcxxSender

SIZE = 32 << 20
LAYOUT = KVLayout("ab" * 16, layers=4, kv_heads=3, head_dim=64, dtype="bfloat16")


def rows(*pieces: tuple[int, int, int]) -> Pieces:
    """(offset, target, length) within memory 0 and region 0."""
    return np.array([(0, offset, 0, target, length) for offset, target, length in pieces], dtype=np.int64)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"never came true: {what}")


def ended(future: Future[None]) -> str:
    return type(future.exception(30)).__name__


@pytest.fixture(params=["tcp", "ucx", "ucxx"])
def carrier(request: pytest.FixtureRequest) -> str:
    if request.param == "ucxx":
        pytest.importorskip("ucxx")
    return str(request.param)


def make(carrier: str, config: TransferConfig = TransferConfig(), stall_s: float = 5.0) -> Sender:
    kinds: dict[str, Any] = {"tcp": TcpSender, "ucx": UcxSender, "ucxx": UcxxSender}
    return kinds[carrier](who("prefill-0", "a"), config, stall_s=stall_s)


@pytest.fixture
def sender(carrier: str) -> Iterator[Sender]:
    one = make(carrier)
    one.register([pattern(SIZE)])
    yield one
    one.close()


def push_slices(sender: Sender, target: Endpoint, shift: int, layers: int = LAYOUT.layers) -> list[Future[None]]:
    """Ten blocks, layer by layer, in reverse order at the target, ``shift`` bytes further on."""
    out = []
    for layer in range(layers):
        inside = layer * LAYOUT.slice_bytes
        pieces = [
            (i * LAYOUT.block_bytes + inside, (9 - i) * LAYOUT.slot_bytes + inside + shift, LAYOUT.slice_bytes)
            for i in range(10)
        ]
        out.append(sender.push(target, rows(*pieces), b"layer %d" % layer))
    return out


def expected_slices(shift: int) -> np.ndarray:
    source, want = pattern(SIZE), np.zeros(SIZE, np.uint8)
    for i in range(10):
        to = (9 - i) * LAYOUT.slot_bytes + shift
        want[to : to + LAYOUT.block_bytes] = source[i * LAYOUT.block_bytes : (i + 1) * LAYOUT.block_bytes]
    return want


def test_every_byte_of_whole_blocks_and_of_a_tail_lands_in_its_place(tmp_path: Path, carrier: str, sender: Sender) -> None:
    with receiving_peer(carrier, tmp_path / "r", SIZE) as other:
        target = other.endpoint()
        other.ask("open")
        assert ended(sender.connect(target)) == "NoneType"
        pushed = push_slices(sender, target, 4096)
        tail_from, tail_to = 20 * LAYOUT.block_bytes, 12 * LAYOUT.slot_bytes
        tail = [(tail_from + at, tail_to + at, length) for at, length in LAYOUT.pieces(17)]
        pushed.append(sender.push(target, rows(*tail), b"tail"))
        assert [ended(one) for one in pushed] == ["NoneType"] * 5
        want = expected_slices(4096)
        for offset, to, length in tail:
            want[to : to + length] = pattern(SIZE)[offset : offset + length]
        assert (map_file(str(tmp_path / "r"), SIZE) == want).all()
        wait_for(lambda: len(other.ask("notices")) == 5, "five notices")
        assert sorted(bytes.fromhex(one) for one in other.ask("notices")) == [*(b"layer %d" % i for i in range(4)), b"tail"]
        assert sender.bytes_sent() == 10 * LAYOUT.block_bytes + 17 * 6 * LAYOUT.row_bytes + 4 * len(b"layer 0") + len(b"tail")
        assert sender.transport_used() == "tcp"
        assert other.ask("transport") == "tcp"
        assert other.end() == 0


def test_a_killed_receiver_fails_the_push_within_two_seconds_and_its_next_life_is_served(
    tmp_path: Path, carrier: str, sender: Sender
) -> None:
    with receiving_peer(carrier, tmp_path / "one", SIZE) as first:
        target = first.endpoint()
        first.ask("open")
        assert ended(sender.connect(target)) == "NoneType"
        first.process.kill()
        first.process.wait()
        begun = time.monotonic()
        with pytest.raises(TransferFailed):
            sender.push(target, rows((0, 0, SIZE)), b"x").result(20)
        assert time.monotonic() - begun < 2.0
        with pytest.raises(TransferFailed):  # and fails at once from now on
            sender.push(target, rows((0, 0, 64)), b"x").result(20)
    sender.forget(target)
    with receiving_peer(carrier, tmp_path / "two", SIZE) as second:
        second.ask("open")
        for one in push_slices(sender, second.endpoint(), 0):
            one.result(20)
        assert (map_file(str(tmp_path / "two"), SIZE) == expected_slices(0)).all()


def test_an_endpoint_made_anew_under_load_fails_the_old_pushes_and_takes_them_again(
    tmp_path: Path, carrier: str, sender: Sender
) -> None:
    with receiving_peer(carrier, tmp_path / "r", SIZE) as other:
        target = other.endpoint()
        other.ask("open")
        assert ended(sender.connect(target)) == "NoneType"
        other.process.send_signal(signal.SIGSTOP)  # so that the pushes are in flight when it is told to begin anew
        pushed = push_slices(sender, target, 0)
        time.sleep(0.05)
        other.tell("remake")
        other.process.send_signal(signal.SIGCONT)
        new = from_json(other.hear())
        assert new.generation == target.generation + 1
        assert new.agent_name != target.agent_name
        pushed += push_slices(sender, target, 0)
        ends = [ended(one) for one in pushed]
        assert set(ends) <= {"NoneType", "TransferFailed"}
        assert "TransferFailed" in ends
        for one in push_slices(sender, new, 0):
            one.result(20)
        assert (map_file(str(tmp_path / "r"), SIZE) == expected_slices(0)).all()


async def test_nothing_of_a_frozen_sender_lands_after_the_endpoint_was_made_anew(tmp_path: Path, carrier: str) -> None:
    view = map_file(str(tmp_path / "r"), SIZE)
    receiver = receiver_of(carrier, who("store-b", "b"), lambda frames: None)
    receiver.register([Region(0, "", SIZE, 4096)], [view])
    with sending_peer(carrier, SIZE) as other:
        receiver.open()
        target = to_json(receiver.describe())
        await asyncio.to_thread(other.ask, "connect", target=target)
        receiver.idle()  # one that polls takes nothing from now on
        await asyncio.to_thread(other.ask, "push", target=target, rows=[[0, 0, 0, 0, SIZE]], frame="00", times=60)
        other.process.send_signal(signal.SIGSTOP)
        await receiver.remake()
        view[:] = 0
        receiver.open()
        other.process.send_signal(signal.SIGCONT)
        ends = await asyncio.to_thread(other.ask, "ends")
        assert ends[-1] == "TransferFailed" and set(ends) <= {"NoneType", "TransferFailed"}
        assert not view.any()
        assert other.end() == 0
    receiver.close()


def test_a_frozen_receiver_is_given_up_after_the_stall_time_and_others_go_on(tmp_path: Path, carrier: str) -> None:
    sender = make(carrier, stall_s=1.0)
    sender.register([pattern(SIZE)])
    with receiving_peer(carrier, tmp_path / "frozen", SIZE) as frozen, receiving_peer(carrier, tmp_path / "well", SIZE) as well:
        targets = [one.endpoint() for one in (frozen, well)]
        for one, target in zip((frozen, well), targets, strict=True):
            one.ask("open")
            assert ended(sender.connect(target)) == "NoneType"
        frozen.process.send_signal(signal.SIGSTOP)
        stuck = sender.push(targets[0], rows((0, 0, SIZE)), b"stuck")
        for one in push_slices(sender, targets[1], 0):
            one.result(20)
        with pytest.raises(PeerSilent):
            stuck.result(20)
        view = map_file(str(tmp_path / "well"), SIZE)
        assert (view == expected_slices(0)).all()
        view[:] = 0
        for one in push_slices(sender, targets[1], 4096):  # by the sender's next agent
            one.result(20)
        assert (view == expected_slices(4096)).all()
        frozen.process.send_signal(signal.SIGCONT)
    sender.close()


def test_a_push_that_waits_can_be_cancelled_and_one_that_is_posted_ends_by_itself(tmp_path: Path, carrier: str) -> None:
    sender = make(carrier, TransferConfig(throttle_bytes_per_s=1e6))
    sender.register([pattern(SIZE)])
    with receiving_peer(carrier, tmp_path / "r", SIZE) as other:
        other.ask("open")
        target = other.endpoint()
        first, second = (sender.push(target, rows((0, i * 300_000, 300_000)), b"x") for i in range(2))
        assert second.cancel()
        first.result(20)
        third = sender.push(target, rows((0, 0, 300_000)), b"x")
        sender.close()
        assert ended(third) == "TransferFailed"
        assert sender.bytes_sent() == 300_001


def test_pieces_outside_their_memory_or_region_are_refused_before_anything_is_posted(
    tmp_path: Path, carrier: str, sender: Sender
) -> None:
    with receiving_peer(carrier, tmp_path / "r", SIZE) as other:
        other.ask("open")
        target = other.endpoint()
        for bad in (rows((SIZE - 10, 0, 11)), rows((0, SIZE - 10, 11)), rows((-1, 0, 1)), np.array([[1, 0, 0, 0, 1]])):
            with pytest.raises(Bug, match="leave"):
                sender.push(target, bad, b"x").result(20)
        assert sender.bytes_sent() == 0
        sender.push(target, rows((0, 0, 1)), b"x").result(20)


def test_threads_sleep_while_nothing_is_open_and_are_gone_after_close(tmp_path: Path, carrier: str) -> None:
    before, sockets = threading.active_count(), _sockets()
    receiver = receiver_of(carrier, who("store-b", "b"), lambda frames: None)
    view = map_file(str(tmp_path / "r"), SIZE)
    receiver.register([Region(0, "", SIZE, 4096)], [view])
    sender = make(carrier)
    sender.register([pattern(SIZE)])
    receiver.open()
    for one in push_slices(sender, receiver.describe(), 0):
        one.result(20)
    receiver.idle()
    ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(("ucx-", "tcp-", "ucxx-"))}
    begun = _cpu_ticks(ours)
    time.sleep(1.0)
    assert _cpu_ticks(ours) - begun <= 1
    sender.close()
    receiver.close()
    assert threading.active_count() == before
    assert _sockets() == sockets or carrier == "ucxx"


def _sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


def _cpu_ticks(tasks: set[int | None]) -> int:
    total = 0
    for task in tasks:
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


def test_a_process_that_leaves_with_pushes_in_flight_and_nothing_closed_exits_cleanly(tmp_path: Path, carrier: str) -> None:
    with receiving_peer(carrier, tmp_path / "r", SIZE) as target, sending_peer(carrier, SIZE) as other:
        target.ask("open")
        to = to_json(target.endpoint())
        other.ask("connect", target=to)
        for _ in range(20):
            other.ask("push", target=to, rows=[[0, 0, 0, 0, SIZE]], frame="00")
        other.tell("leave")
        assert other.process.wait(30) == 0
        assert target.end() == 0


def test_a_pickle_and_noise_at_every_port_of_a_receiver_do_nothing(tmp_path: Path, carrier: str, sender: Sender) -> None:
    marker = tmp_path / "marker"
    opening = f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode()
    with receiving_peer(carrier, tmp_path / "r", SIZE) as other:
        target = other.endpoint()
        other.ask("open")
        sender.connect(target).result(20)
        listening = psutil.Process(other.process.pid).net_connections("tcp")
        ports = [one.laddr for one in listening if one.status == psutil.CONN_LISTEN]
        assert ports
        for host, port in ports:
            for data in (opening, np.random.default_rng(9).bytes(4096)):
                with socket.create_connection((host, port), 5) as raw, suppress(ConnectionError):
                    raw.sendall(data)
        for one in push_slices(sender, target, 0):
            one.result(20)
        assert (map_file(str(tmp_path / "r"), SIZE) == expected_slices(0)).all()
        assert not marker.exists() and other.end() == 0
