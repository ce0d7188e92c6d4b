"""Names of things, as distinct string types so that mypy keeps them apart."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NewType

from moonpool.core.errors import ConfigError

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)  # one per host (several may share a machine in tests); owns one store node
MemberId = NewType("MemberId", str)  # "prefill-0": stable over restarts; the incarnation tells lives apart
Incarnation = NewType("Incarnation", int)  # wall-clock nanoseconds at process start: newer is larger

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


class Role(StrEnum):
    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # prefill and decode in one process, local hand-off
    CONDUCTOR = "conductor"
    GATEWAY = "gateway"


def newer_than(wall_ns: int, newest: Incarnation) -> Incarnation:
    """A new life's number: the wall clock's, unless that was set back behind ``newest``, the largest one known of its name."""
    return Incarnation(max(wall_ns, newest + 1))


def checked_name(value: str, field: str) -> str:
    """``value`` if it can be part of file names, metric labels and Ray actor names; ConfigError otherwise."""
    if not _NAME.match(value):
        raise ConfigError(
            f"{field}: {value!r} is not a name; use 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit",
            param=field,
        )
    return value
