"""What goes into the SSD tier and what comes back. An extent is the int that names a block's place on the tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.layout import SLOT_ALIGN, KVLayout
from moonpool.core.use import Use


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A sealed pool slot to be written as it lies.

    ``data`` is its [slot_bytes] uint8 view, page-aligned, trailer included. It must not change until ``write`` returns.
    ``parent`` is None for the first block of a sequence.
    """

    key: bytes
    parent: bytes | None
    layout: KVLayout
    use: Use
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """``into`` is a [slot_bytes] uint8 view, page-aligned; it belongs to the tier until ``read`` returns."""

    extent: int
    key: bytes
    layout: KVLayout
    into: NDArray[np.uint8]


class ReadEnd(StrEnum):
    OK = "ok"  # every slice agrees with its digest; the trailer is in place
    LATE = "late"  # not started in time; ``into`` was not touched and never will be
    TORN = "torn"  # the bytes are not those of this block; the extent is dropped
    GONE = "gone"  # no such extent, or its file could not be read; the extent is dropped


@dataclass(frozen=True, slots=True)
class Recovered:
    """A block found on the tier at start. ``layout`` is the fingerprint of its KV layout."""

    key: bytes
    parent: bytes | None
    layout: str
    extent: int
    use: Use


def require_slot(data: NDArray[np.uint8], layout: KVLayout) -> None:
    """Bug where direct I/O could not use it."""
    if data.nbytes != layout.slot_bytes or data.dtype != np.uint8 or data.__array_interface__["data"][0] % SLOT_ALIGN:
        raise Bug(f"a slot of {layout.slot_bytes} page-aligned bytes is needed, not {data.nbytes} bytes at that address")
