"""Names and bytes of objects on the shared tier, and when an unreachable store is asked again. Pure.

An object is a block: the 4 KiB header of an SSD extent (``kvstore.ssd.format``) with zeroes where the extent's place
would stand, then the pool slot as it lies in memory. So it says itself what it is, and is checked as an extent is. Both
are sealed as an extent's are where KV bytes are encrypted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore import slices
from moonpool.kvstore.sealing.stream import TAG_BYTES
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.blocks import Write
from moonpool.kvstore.ssd.copying import is_block
from moonpool.kvstore.ssd.format import HEADER_BYTES, ExtentHeader, decode_extent, encode_extent

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
SEALED = ".sealed"


def object_name(fingerprint: str, key: bytes, *, sealed: bool = False) -> str:
    """``LAYOUT/FIRST BYTE/KEY``, all hex; the middle part keeps folders small. Sealed objects lie apart from plain ones."""
    return f"{fingerprint}{SEALED if sealed else ''}/{key[:1].hex()}/{key.hex()}"


def object_bytes(layout: KVLayout) -> int:
    return HEADER_BYTES + layout.slot_bytes


def copy_of(block: Write) -> NDArray[np.uint8]:
    """[object_bytes + TAG_BYTES] uint8: room for the header, a private copy of the slot, and room for sealing it."""
    size = object_bytes(block.layout)
    out = np.empty(size + TAG_BYTES, np.uint8)
    out[HEADER_BYTES:size] = block.data
    return out


def seal(raw: NDArray[np.uint8], block: Write, vault: Vault | None = None) -> NDArray[np.uint8] | None:
    """The [object_bytes] object made of a ``copy_of`` the block, in place; None where the copy differs from its own digests."""
    layout = block.layout
    slot = raw[HEADER_BYTES : HEADER_BYTES + layout.slot_bytes]
    slot[layout.block_bytes + layout.layers * DIGEST_BYTES :] = 0  # nothing vouches for what lies there
    digests = tuple(int(digest) for digest in slices.trailer_of(layout, slot, 0))
    if not is_block(layout, slot, block.key, digests):
        return None
    header = ExtentHeader(0, 0, 0, 0, layout.fingerprint, block.key, block.parent, block.use, digests)
    page = encode_extent(header) if vault is None else vault.seal(header, slot, raw[HEADER_BYTES:])
    raw[:HEADER_BYTES] = np.frombuffer(page, np.uint8)
    return raw[: object_bytes(layout)]


def slot_in(raw: NDArray[np.uint8], layout: KVLayout, key: bytes, vault: Vault | None = None) -> NDArray[np.uint8] | None:
    """The [slot_bytes] slot inside an object's bytes; None where they are not those of this block, whole and unchanged."""
    if raw.nbytes != object_bytes(layout):
        return None
    page, slot = raw[:HEADER_BYTES].tobytes(), raw[HEADER_BYTES:]
    found = None if vault is None else vault.open_header(page)
    header = decode_extent(page) if vault is None else None if found is None else found.header
    if header is None or header.key != key or header.layout != layout.fingerprint:
        return None
    if vault is not None and found is not None:
        closed = np.concatenate((slot, np.zeros(TAG_BYTES, np.uint8)))
        slot = closed[: layout.slot_bytes]  # in place: fresh memory costs as much as the cipher
        if not vault.open_slot(found, closed, slot):
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
