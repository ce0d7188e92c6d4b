"""Block events: numbered per (node, incarnation), so that a subscriber notices a gap and asks for a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.ids import Incarnation


class Tier(StrEnum):
    G1 = "g1"  # device pages of a worker
    G2 = "g2"  # host DRAM
    G3 = "g3"  # local SSD
    G4 = "g4"  # shared or object storage


class BlockChange(StrEnum):
    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """``holder`` is a node id for G2 and below, a worker id for G1."""

    change: BlockChange
    tier: Tier
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events ``number .. number + len(events) - 1`` of one holder's life."""

    holder: str
    incarnation: Incarnation
    number: int
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """Everything ``holder`` holds once event ``number`` has been applied."""

    holder: str
    incarnation: Incarnation
    number: int
    entries: tuple[tuple[Tier, tuple[bytes, ...]], ...]
