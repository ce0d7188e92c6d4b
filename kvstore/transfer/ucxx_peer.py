"""A target of the ucxx carrier as its sender keeps it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import MoonpoolError
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.kvstore.transfer.pieces import Extents, region_sizes
from moonpool.kvstore.transfer.ucxx_worker import Requests, Worker, empty
from moonpool.kvstore.transfer.write import Write


class Peer:
    """Of the sender's thread alone."""

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.regions = Extents({r.number: 0 for r in target.regions}, region_sizes(target.regions))
        self.worker: Worker | None = None
        self.number: int | None = None  # of the connection; None before the welcome
        self.connected = False
        self.since = 0.0
        self.sends = Requests()
        self.hears = Requests()
        self.heard: NDArray[np.uint8] = empty(0)
        self.hello = b""
        self.waiting: deque[Write] = deque()
        self.posted: deque[Write] = deque()
        self.connects: list[Future[None]] = []
        self.pushes = 0
        self.tags = 0
        self.moved = 0.0
        self.forgotten = False
        self.lost: MoonpoolError | None = None
