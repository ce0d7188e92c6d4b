"""One end of a carrier in a process of its own, told what to do line by line: ``python -m support.carrier_peer``.

The receiver's memory is a file that the test maps too; the sender's source is ``pattern``, which the test can make as well.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices, Receiver, Sender
from moonpool.kvstore.transfer.choose import make_receivers, make_sender

ROOT = Path(__file__).resolve().parents[2]


def pattern(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(1, 255, size, dtype=np.uint8)


def map_file(path: str, size: int) -> NDArray[np.uint8]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, size)
        return np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)
    finally:
        os.close(fd)


def who(name: str, node: str, incarnation: int | None = None) -> Member:
    role = Role.STORE if name.startswith("store") else Role.PREFILL
    return Member(MemberId(name), role, NodeId(node), Incarnation(incarnation or time.time_ns()), "127.0.0.1:1", os.getpid())


def to_json(endpoint: Endpoint) -> dict[str, Any]:
    return asdict(endpoint) | {"metadata": endpoint.metadata.hex()}


def from_json(value: dict[str, Any]) -> Endpoint:
    regions = tuple(Region(**one) for one in value["regions"])
    return Endpoint(
        **value | {"metadata": bytes.fromhex(value["metadata"]), "bases": tuple(value["bases"]), "regions": regions}
    )


def receiver_of(carrier: str, member: Member, on_notices: OnNotices) -> Receiver:
    (receiver,) = make_receivers(TransferConfig.model_validate({"carrier": carrier}), member, lambda _: on_notices)
    return receiver


def sender_of(carrier: str, member: Member) -> Sender:
    return make_sender(carrier, member, TransferConfig(), lambda endpoint, frames: Future())


class Peer:
    """The test's side of such a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.carrier_peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )

    def ask(self, do: str, **values: Any) -> Any:
        self.tell(do, **values)
        return self.hear()

    def tell(self, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | values) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended: {self.process.wait()}"
        return json.loads(line)

    def endpoint(self) -> Endpoint:
        return from_json(self.ask("describe"))

    def end(self) -> int:
        """Exit code of an orderly end."""
        if self.process.poll() is None:
            self.tell("end")
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return self.process.wait(20)


@contextmanager
def peer(*arguments: str) -> Iterator[Peer]:
    one = Peer(*arguments)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
        one.end()


def receiving_peer(carrier: str, path: Path, size: int, incarnation: int | None = None) -> Any:
    return peer("receive", carrier, str(path), str(size), str(incarnation or time.time_ns()))


def sending_peer(carrier: str, size: int) -> Any:
    return peer("send", carrier, str(size))


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _receive(carrier: str, path: str, size: int, incarnation: int) -> None:
    view, notices = map_file(path, size), list[bytes]()
    receiver = receiver_of(carrier, who("store-b", "b", incarnation), notices.extend)
    receiver.register([Region(0, path, size, 4096)], [view])
    for order in _orders():
        match order["do"]:
            case "describe":
                _answer(to_json(receiver.describe()))
            case "open":
                _answer(receiver.open())
            case "idle":
                _answer(receiver.idle())
            case "remake":
                _answer(to_json(asyncio.run(receiver.remake())))
            case "notices":
                _answer([frame.hex() for frame in notices])
            case "transport":
                _answer(receiver.transport_used())
            case "end":
                break
    receiver.close()


def _send(carrier: str, size: int) -> None:
    sender = sender_of(carrier, who("prefill-0", "a"))
    sender.register([pattern(size)])
    pushed: list[Future[None]] = []
    for order in _orders():
        match order["do"]:
            case "push":
                rows, target = np.array(order["rows"], dtype=np.int64), from_json(order["target"])
                for _ in range(order.get("times", 1)):
                    pushed.append(sender.push(target, rows, bytes.fromhex(order["frame"])))
                _answer(len(pushed))
            case "connect":
                _answer(sender.connect(from_json(order["target"])).result(20))
            case "ends":
                _answer([type(one.exception(30)).__name__ for one in pushed])
            case "end":
                break
            case "leave":  # without closing anything
                return
    sender.close()


def main(arguments: Sequence[str]) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for answers
    if arguments[0] == "receive":
        _receive(arguments[1], arguments[2], int(arguments[3]), int(arguments[4]))
    else:
        _send(arguments[1], int(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
