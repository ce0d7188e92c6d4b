"""Who holds what at a store node: lives, landings, tickets and reservations. Values and records only; rules are in pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from moonpool.core.ids import Incarnation, MemberId, RequestId
from moonpool.core.landing import Landing, SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.lifetime import Lifetime
from moonpool.core.use import Use


class Life(NamedTuple):
    """One life of one process: whoever writes must be named by it, so that proof of a death frees the right slots."""

    member: MemberId
    incarnation: Incarnation


class Reach(StrEnum):
    """How a writer gets at the slots, and so what stops it. Its own word and its death always do."""

    MAPPED = "mapped"  # it maps the region files: nothing else
    CARRIER = "carrier"  # only through the node's carrier endpoint: making that anew stops it, too
    UNKNOWN = "unknown"  # not (yet) known: it may need the endpoint, and nothing else is a proof


@dataclass(frozen=True, slots=True)
class LandingAsk:
    """What a writer asks for. ``keys`` are whole blocks in order from prompt block ``first_block``.

    ``reader`` is the session that hears of slices and ends the landing; None: it ends with its writer.
    """

    request: RequestId
    attempt: int
    writer: Life
    reader: int | None
    layout: KVLayout
    keys: tuple[bytes, ...]
    first_block: int = 0
    tail_valid: int = 0
    parent: bytes | None = None
    reach: Reach = Reach.CARRIER
    generation: int = 0
    use: Use = field(default_factory=Use)


class Reserved(StrEnum):
    NEW = "new"
    SEALED = "sealed"  # here already
    IN_FLIGHT = "in_flight"  # somebody else is writing it
    FULL = "full"  # no slot, and nothing that could be evicted
    NO_PARENT = "no_parent"  # its parent is neither here nor on its way: it would not be findable


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer for one key; ``slot`` and a nonzero ``id`` only where ``state`` is NEW."""

    key: bytes
    state: Reserved
    slot: SlotRef | None = None
    id: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """A slice that a notice announced and that still misses: verify it, then call ``Pool.landed`` or ``rejected``."""

    landing: int
    slot: int
    ref: SlotRef
    block: int
    valid: int
    digest: int


@dataclass(slots=True, eq=False)
class Target:
    """One slot of a landing. ``left`` and ``bad`` are bit sets of layers: still missing, and missing after a bad try."""

    slot: int
    key: bytes
    parent: bytes | None
    block: int
    valid: int
    left: int
    findable: bool  # a whole block whose parent is known; false for the tail
    coming: bool  # it may yet be sealed, so publishers of the same key need not write it
    bad: int = 0
    row: int | None = None  # of the index, once sealed; the landing holds one pin on it


@dataclass(slots=True, eq=False)
class LandingClaim:
    """A granted landing. Its slots come free when both the writer and the reader are through with it.

    ``fenced``: its reader gave up, or its writer fell silent, before the writer said ``Drained``.
    """

    landing: Landing
    ask: LandingAsk
    account: int  # whose slots these are
    targets: dict[int, Target]  # by slot
    held: list[int]  # rows of the index, pinned for the reader
    anchor: list[int]  # the parent of the first block, if it has one here: pinned so that it cannot be evicted meanwhile
    incomplete: int  # targets with layers missing
    life: Lifetime = field(default_factory=Lifetime)
    writer_open: bool = True
    reader_open: bool = True
    fenced: bool = False


@dataclass(slots=True, eq=False)
class TicketClaim:
    id: int
    session: int
    rows: list[int] = field(default_factory=list)  # of the index, pinned
