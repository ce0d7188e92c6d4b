"""The same-host carrier: copies into mapped files, frames by a call of the caller's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from support.carrier_peer import map_file, pattern

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, PeerSilent, TransferFailed
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.segment import MAX_FRAME_BYTES, SegmentSender

SIZE = 1 << 20


def target_at(path: Path) -> Endpoint:
    map_file(str(path), SIZE)
    return Endpoint(NodeId("a"), Incarnation(1), 1, "ucx", "x", b"", (0,), (Region(3, str(path), SIZE, 4096),))


def rows(*pieces: tuple[int, int, int]) -> Pieces:
    return np.array([(0, offset, 3, to, length) for offset, to, length in pieces], dtype=np.int64)


class Node:
    """Takes frames when the test lets it."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.answers: list[Future[None]] = []
        self.called = threading.Semaphore(0)

    def notify(self, endpoint: Endpoint, frames: Sequence[bytes]) -> Future[None]:
        self.calls.append(list(frames))
        self.answers.append(Future())
        self.called.release()
        return self.answers[-1]


def test_bytes_are_in_place_before_their_notice_is_sent(tmp_path: Path) -> None:
    node, source = Node(), pattern(SIZE)
    sender = SegmentSender(TransferConfig(), node.notify)
    sender.register([source])
    done = sender.push(target_at(tmp_path / "moonpool+c+a+1+3"), rows((0, 4096, 5000), (9000, 100_000, 70_000)), b"frame")
    assert node.called.acquire(timeout=5)
    view = map_file(str(tmp_path / "moonpool+c+a+1+3"), SIZE)
    assert (view[4096 : 4096 + 5000] == source[:5000]).all()
    assert (view[100_000:170_000] == source[9000:79_000]).all()
    assert np.count_nonzero(view) == 75_000
    assert not done.done()
    node.answers[0].set_result(None)
    done.result(5)
    assert sender.bytes_sent() == 75_000 + 5
    sender.close()


def test_frames_that_gather_while_a_call_is_on_its_way_go_together(tmp_path: Path) -> None:
    node, target = Node(), target_at(tmp_path / "moonpool+c+a+1+3")
    sender = SegmentSender(TransferConfig(), node.notify)
    sender.register([pattern(SIZE)])
    frames = [b"0", b"1", b"2", bytes(MAX_FRAME_BYTES), b"4"]
    pushed = [sender.push(target, rows((0, 0, 64)), frame) for frame in frames]
    assert node.called.acquire(timeout=5)
    sender.connect(target).result(5)  # everything before it is copied
    node.answers[0].set_result(None)
    assert node.called.acquire(timeout=5)
    node.answers[1].set_result(None)
    assert node.called.acquire(timeout=5)
    node.answers[2].set_result(None)
    assert node.called.acquire(timeout=5)
    node.answers[3].set_result(None)
    for one in pushed:
        one.result(5)
    assert [len(call) for call in node.calls] == [1, 2, 1, 1]
    assert [frame for call in node.calls for frame in call] == frames
    sender.close()


def test_a_call_that_fails_fails_its_pushes_and_the_next_ones_go_on(tmp_path: Path) -> None:
    node, target = Node(), target_at(tmp_path / "moonpool+c+a+1+3")
    sender = SegmentSender(TransferConfig(), node.notify)
    sender.register([pattern(SIZE)])
    first = sender.push(target, rows((0, 0, 64)), b"1")
    assert node.called.acquire(timeout=5)
    node.answers[0].set_exception(PeerSilent("no answer"))
    with pytest.raises(PeerSilent):
        first.result(5)
    second = sender.push(target, rows((0, 0, 64)), b"2")
    assert node.called.acquire(timeout=5)
    node.answers[1].set_result(None)
    second.result(5)
    sender.close()


def test_what_cannot_be_mapped_or_leaves_its_region_is_refused(tmp_path: Path) -> None:
    node, target = Node(), target_at(tmp_path / "moonpool+c+a+1+3")
    sender = SegmentSender(TransferConfig(), node.notify)
    sender.register([pattern(SIZE)])
    gone = Endpoint(
        NodeId("c"), Incarnation(1), 1, "ucx", "x", b"", (), (Region(0, str(tmp_path / "moonpool+c+a+1+0"), SIZE, 4096),)
    )
    with pytest.raises(TransferFailed, match="region 0"):
        sender.connect(gone).result(5)
    with pytest.raises(Bug, match="leave region"):
        sender.push(target, rows((0, SIZE - 10, 11)), b"x").result(5)
    assert not node.calls
    sender.close()
    with pytest.raises(TransferFailed, match="closed"):
        sender.push(target, rows((0, 0, 1)), b"x").result(5)


def test_closing_waits_for_the_call_under_way_and_fails_what_comes_after(tmp_path: Path) -> None:
    node, target = Node(), target_at(tmp_path / "moonpool+c+a+1+3")
    sender = SegmentSender(TransferConfig(), node.notify)
    sender.register([pattern(SIZE)])
    first = sender.push(target, rows((0, 0, 64)), b"1")
    assert node.called.acquire(timeout=5)
    closing = threading.Thread(target=sender.close)
    closing.start()
    assert not first.done()
    node.answers[0].set_result(None)
    closing.join(5)
    assert not closing.is_alive()
    first.result(0)
