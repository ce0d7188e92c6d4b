"""Every test here closes its files and ends its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest


def _files() -> set[str]:
    out = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            out.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # the one this listing used
    return {path for path in out if "/segment-" in path or path.endswith(("/lock", "/lock (deleted)"))}


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("ssd ")}


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    threads, files = _threads(), _files()
    yield
    assert _threads() <= threads
    assert _files() <= files
