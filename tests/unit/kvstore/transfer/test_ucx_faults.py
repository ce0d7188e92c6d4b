"""UCX over loopback with one call of its library failing: every push ends soon, and the next one over the same link works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.carrier_peer import map_file, pattern, receiving_peer, who

from moonpool.core.config import TransferConfig
from moonpool.core.errors import TransferFailed
from moonpool.core.landing import Region
from moonpool.kvstore.transfer import ucx
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.kvstore.transfer.ucx_receiver import UcxReceiver
from moonpool.kvstore.transfer.ucx_sender import UcxSender

SIZE = 1 << 20


class Trips:
    """Makes agents of which the first call of ``method`` (of an agent, or of the handle of a write) fails, once in all."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.tripped = False

    def __call__(self, name: str, config: TransferConfig) -> Any:
        return _Tripping(ucx.new_agent(name, config), self)

    def error(self) -> Exception:
        self.tripped = True
        return ucx.nixl_errors()[0]("out of order")


class _Tripping:
    def __init__(self, real: Any, trips: Trips) -> None:
        self._real = real
        self._trips = trips

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name == "initialize_xfer":
            return lambda *given: _Tripping(found(*given), self._trips)
        if name in ("transfer", "check_xfer_state"):  # take the handle itself
            return lambda handle, *given: self._call(found, name, handle._real, *given)
        return (lambda *given: self._call(found, name, *given)) if callable(found) else found

    def _call(self, found: Any, name: str, *given: Any) -> Any:
        if name == self._trips.method and not self._trips.tripped:
            raise self._trips.error()
        return found(*given)


@contextmanager
def sender(trips: Trips) -> Iterator[UcxSender]:
    one = UcxSender(who("prefill-0", "a"), TransferConfig(), new_agent=trips)
    one.register([pattern(SIZE)])
    yield one
    one.close()


def push(sender: UcxSender, target: Endpoint) -> None:
    sender.push(target, np.array([[0, 0, 0, 0, SIZE]]), b"x").result(10)


def test_a_call_that_fails_at_the_sender_fails_its_push_soon_and_the_next_one_works(tmp_path: Path) -> None:
    with receiving_peer("ucx", tmp_path / "r", SIZE) as other:
        other.ask("open")
        target = other.endpoint()
        view = map_file(str(tmp_path / "r"), SIZE)
        for method in ("register_memory", "add_remote_agent", "transfer", "check_xfer_state", "release", "deregister_memory"):
            trips = Trips(method)
            with sender(trips) as one:
                begun = time.monotonic()
                try:
                    push(one, target)
                except TransferFailed:
                    assert method not in ("release", "deregister_memory")
                assert time.monotonic() - begun < 2.0
                one.connect(target).result(10)
                view[:] = 0
                push(one, target)
                assert (view == pattern(SIZE)).all()
            assert trips.tripped, method


@pytest.mark.parametrize("method", ["register_memory", "get_new_notifs", "deregister_memory"])
async def test_a_call_that_fails_at_the_receiver_leaves_it_serving(tmp_path: Path, method: str) -> None:
    trips, view = Trips(method), np.zeros(SIZE, np.uint8)
    receiver = UcxReceiver(who("store-b", "b"), TransferConfig(), lambda frames: None, new_agent=trips)
    regions = [Region(0, "", SIZE, 4096)]
    try:
        receiver.register(regions, [view])
    except TransferFailed:
        assert method == "register_memory"
        receiver.register(regions, [view])
    receiver.open()
    if method == "deregister_memory":
        await receiver.remake()
    with sender(Trips("")) as one:
        one.connect(receiver.describe())
        push(one, receiver.describe())
    assert (view == pattern(SIZE)).all() and trips.tripped
    receiver.idle()
    receiver.close()
