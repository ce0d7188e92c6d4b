"""One side of ``moonpool bench carrier`` in a process of its own: ``python -m moonpool.bench.carrier_child SIDE ...``.

Orders come as JSON lines on standard input, each is answered by one on standard output.

    receive CARRIER FILE    the receiving end over the mapped file (``segment``: only answers; ``line``: a bare socket)
    send CARRIER            a sending end that pushes without end, to be killed
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import MIB, TransferConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices, Receiver, Sender
from moonpool.kvstore.transfer.choose import make_receivers, make_sender
from moonpool.kvstore.transfer.segment import Notify

ARENA = 128 * MIB
Bytes = NDArray[np.uint8]


def settings(carrier: str) -> TransferConfig:
    return TransferConfig.model_validate({"carrier": carrier, "ucx_net_devices": "lo"})


def member(name: str, node: str) -> Member:
    role = Role.STORE if name == "store" else Role.PREFILL
    return Member(MemberId(name), role, NodeId(node), Incarnation(time.time_ns()), "127.0.0.1:1", os.getpid())


def map_arena(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), ARENA, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)


def sending_end(carrier: str, source: Bytes, notify: Notify) -> Sender:
    sender = make_sender(carrier, member("writer", "a"), settings(carrier), notify)
    sender.register([source])
    return sender


def receiving_end(carrier: str, region: Region, view: Bytes, on_notices: OnNotices) -> Receiver:
    (receiver,) = make_receivers(settings(carrier), member("store", "b"), lambda _: on_notices)
    receiver.register([region], [view])
    receiver.open()
    return receiver


def encode(endpoint: Endpoint) -> dict[str, Any]:
    return asdict(endpoint) | {"metadata": endpoint.metadata.hex()}


def decode(value: dict[str, Any]) -> Endpoint:
    regions = tuple(Region(**one) for one in value["regions"])
    return Endpoint(
        **value | {"metadata": bytes.fromhex(value["metadata"]), "bases": tuple(value["bases"]), "regions": regions}
    )


def no_call(endpoint: Endpoint, frames: object) -> Future[None]:
    """Stands for ``Notify`` where nothing is to be told."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _cpu() -> float:
    return time.process_time()


def _receive(carrier: str, path: Path) -> None:
    view = map_arena(path)
    if carrier == "segment":
        receiver, offer = None, asdict(Endpoint(NodeId("a"), Incarnation(1), 1, carrier, "s", b"", (0,), (_region(path),)))
        offer["metadata"] = ""
    else:
        receiver = receiving_end(carrier, _region(path), view, lambda frames: None)
        offer = encode(receiver.describe())
    for order in _orders():
        match order["do"]:
            case "describe":
                _answer(offer)
            case "cpu":
                _answer(_cpu())
            case _:
                _answer(None)
    if receiver is not None:
        receiver.idle()
        receiver.close()


def _region(path: Path) -> Region:
    return Region(0, str(path), ARENA, 4096)


def _line(path: Path) -> None:
    """Reads what comes in pieces of the size asked for, and says so when all of it is there."""
    view = map_arena(path).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _answer(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        for order in _orders():
            if order["do"] == "cpu":
                _answer(_cpu())
                continue
            piece, left, at = max(int(order["piece"]), 64 << 10), int(order["total"]), 0
            while left:
                read = connection.recv_into(view[at : at + min(piece, left)])
                left -= read
                at = (at + read) % (ARENA - piece)
            _answer(None)


def _send(carrier: str) -> None:
    """Pushes to the endpoint on standard input until it is killed; says so once the first push has ended."""
    target = decode(json.loads(sys.stdin.readline()))
    source = np.ones(ARENA, np.uint8)
    sender = sending_end(carrier, source, no_call)
    pieces = np.array([[0, 0, 0, 0, 8 * MIB]], dtype=np.int64)
    sender.push(target, pieces, b"x").result(20)
    room = threading.Semaphore(8)

    def ended(_: Future[None]) -> None:
        room.release()

    _answer(None)
    while True:
        room.acquire()
        sender.push(target, pieces, b"x").add_done_callback(ended)


def main(arguments: list[str]) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    match arguments:
        case ["receive", "line", path]:
            _line(Path(path))
        case ["receive", carrier, path]:
            _receive(carrier, Path(path))
        case ["send", carrier]:
            _send(carrier)


if __name__ == "__main__":
    main(sys.argv[1:])
