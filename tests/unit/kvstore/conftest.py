"""Every test here leaves nothing behind: no thread of ours, no socket, no mapped region."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OURS = ("store ", "ucx-", "ucxx-", "tcp-", "segment", "memory")
PATIENCE_S = 3.0  # gRPC closes its sockets in the background


def _sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "anon_inode:[pidfd]"))
        except OSError:
            pass  # the one this listing used
    return found


def _regions() -> int:
    return Path("/proc/self/maps").read_text().count("moonpool+")


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(OURS)}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """UCXX is let off the sockets: it keeps those of a worker whose requests were cancelled half way."""
    sockets, regions = _sockets(), _regions()
    if "[ucxx]" in request.node.name:
        sockets = 1 << 20
    yield
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if not _threads() and _sockets() <= sockets and _regions() <= regions:
            return
        gc.collect()
        time.sleep(0.02)
    assert _threads() == set()
    assert _sockets() <= sockets, "sockets or process descriptors stayed open"
    assert _regions() <= regions, "regions stayed mapped"
