"""Layer slices on their way out: where their bytes lie, what they digest to, and how a push of them is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.digests import slice_digest
from moonpool.core.landing import Landing, LandingSlot, PushNotice, SliceNotice, SlotRef
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore.transfer.carrier import Pieces
from moonpool.wire.frames import encode_notice


@dataclass(frozen=True, slots=True)
class Source:
    """A layer slice to push: its bytes are at ``offset`` of source memory ``memory``, and go to ``slot``."""

    memory: int
    offset: int
    digest: int
    slot: LandingSlot


class SourceReader:
    """Finds and digests slices in the registered source memories. Any thread."""

    def __init__(self, layout: KVLayout, memories: Sequence[NDArray[np.uint8]]) -> None:
        self._layout = layout
        self._memories = memories

    def of_page(self, page: int, layer: int, slot: LandingSlot) -> Source:
        """From the page tensor, which is memory 0; digests the valid tokens, seeded with the slot's key and the layer."""
        layout = self._layout
        offset = page * layout.block_bytes + layer * layout.slice_bytes
        data = self._memories[0][offset : offset + layout.slice_bytes]
        return Source(0, offset, slice_digest(layout, data, slot.slot.key, layer, slot.valid), slot)

    def of_sealed(self, ref: SlotRef, layer: int, slot: LandingSlot) -> Source:
        """From a sealed slot of our regions. It is whole and has the target's key, so the digest in its trailer holds."""
        layout = self._layout
        at = ref.offset + layout.block_bytes + layer * DIGEST_BYTES
        digest = int.from_bytes(self._memories[ref.region][at : at + DIGEST_BYTES].tobytes(), "little")
        return Source(ref.region, ref.offset + layer * layout.slice_bytes, digest, slot)


def pieces_of(layout: KVLayout, layer: int, sources: Sequence[Source]) -> Pieces:
    """Whole blocks are one piece each, an unfinished one a piece per head of K and of V."""
    rows = []
    for source in sources:
        slot = source.slot
        to = slot.slot.offset + layer * layout.slice_bytes
        for inside, length in layout.pieces(slot.valid):
            rows.append((source.memory, source.offset + inside, slot.slot.region, to + inside, length))
    return np.array(rows, dtype=np.int64)


def frame_of(landing: Landing, chunk: int, layer: int, sources: Sequence[Source]) -> bytes:
    notices = tuple(SliceNotice(s.slot.slot.region, s.slot.slot.offset, s.slot.valid, s.digest) for s in sources)
    return encode_notice(PushNotice(landing.id, landing.request, landing.attempt, chunk, layer, notices))
