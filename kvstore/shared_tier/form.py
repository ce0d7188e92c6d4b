"""Names and bytes of objects on the shared tier, and when an unreachable store is asked again. Pure.

An object is a block: the 4 KiB header of an SSD extent (``kvstore.ssd.format``) with zeroes where the extent's place
would stand, then the pool slot as it lies in memory. So it says itself what it is, and is checked as an extent is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore import slices
from moonpool.kvstore.ssd.blocks import Write
from moonpool.kvstore.ssd.copying import is_block
from moonpool.kvstore.ssd.format import HEADER_BYTES, ExtentHeader, decode_extent, encode_extent

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


def object_name(fingerprint: str, key: bytes) -> str:
    """``LAYOUT/FIRST BYTE/KEY``, all hex; the middle part keeps folders small."""
    return f"{fingerprint}/{key[:1].hex()}/{key.hex()}"


def object_bytes(layout: KVLayout) -> int:
    return HEADER_BYTES + layout.slot_bytes


def copy_of(block: Write) -> NDArray[np.uint8]:
    """[object_bytes] uint8: room for the header, then a private copy of the slot."""
    out = np.empty(object_bytes(block.layout), np.uint8)
    out[HEADER_BYTES:] = block.data
    return out


def seal(raw: NDArray[np.uint8], block: Write) -> bool:
    """Write the header of a ``copy_of`` the block; False where the copy differs from its own digests."""
    layout, slot = block.layout, raw[HEADER_BYTES:]
    slot[layout.block_bytes + layout.layers * DIGEST_BYTES :] = 0  # nothing vouches for what lies there
    digests = tuple(int(digest) for digest in slices.trailer_of(layout, slot, 0))
    if not is_block(layout, slot, block.key, digests):
        return False
    header = ExtentHeader(0, 0, 0, 0, layout.fingerprint, block.key, block.parent, block.use, digests)
    raw[:HEADER_BYTES] = np.frombuffer(encode_extent(header), np.uint8)
    return True


def slot_in(raw: NDArray[np.uint8], layout: KVLayout, key: bytes) -> NDArray[np.uint8] | None:
    """The [slot_bytes] slot inside an object's bytes; None where they are not those of this block, whole and unchanged."""
    if raw.nbytes != object_bytes(layout):
        return None
    header = decode_extent(raw[:HEADER_BYTES].tobytes())
    slot = raw[HEADER_BYTES:]
    if header is None or header.key != key or header.layout != layout.fingerprint:
        return None
    return slot if is_block(layout, slot, key, header.digests) else None


@dataclass(slots=True)
class Outage:
    """Whether one way of asking the store works. After each failure in a row it is left alone twice as long.

    ``now`` in seconds. ``fault`` is what it said last; empty while it works.
    """

    fault: str = ""
    failures: int = 0
    until: float = 0.0

    def failed(self, fault: str, now: float) -> bool:
        """Whether that is news. Failures that were under way together count once."""
        news, self.fault = not self.fault, fault
        if now >= self.until:
            self.until = now + min(FIRST_PAUSE_S * 2**self.failures, LONGEST_PAUSE_S)
            self.failures = min(self.failures + 1, 16)
        return news

    def worked(self) -> bool:
        """Whether that is news."""
        news = bool(self.fault)
        self.fault, self.failures, self.until = "", 0, 0.0
        return news

    def left(self, now: float) -> float:
        """Seconds until the store may be asked again; 0: now."""
        return max(self.until - now, 0.0)

    def words(self, now: float) -> str:
        return f"unreachable, asked again in {self.left(now):.1f} s: {self.fault}" if self.fault else "reachable"
