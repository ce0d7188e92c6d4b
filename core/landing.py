"""Slots of a store node, and landings: a granted, all-or-nothing list of slots where a prompt's missing blocks land."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot: region number and byte offset in it. ``key`` is what the slot holds or will hold."""

    region: int
    offset: int
    key: bytes


@dataclass(frozen=True, slots=True)
class LandingSlot:
    """Prompt block ``block`` shall land in ``slot``; ``valid`` tokens of it are meaningful (fewer only in the tail)."""

    block: int
    slot: SlotRef
    valid: int


@dataclass(frozen=True, slots=True)
class Landing:
    """Granted by the store node ``node`` to ``writer`` for (request, attempt).

    ``slots`` are to be written by the writer; ``held`` are prompt blocks this node already has sealed, pinned for the
    reader until the landing ends. ``generation`` names the life of the node's carrier endpoint: an endpoint made anew
    has the next one, and slices not yet acknowledged are pushed again.
    """

    id: int
    request: RequestId
    attempt: int
    node: NodeId
    incarnation: Incarnation
    generation: int
    writer: MemberId
    slots: tuple[LandingSlot, ...]
    held: tuple[LandingSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceNotice:
    """One layer slice of one slot as its sender describes it."""

    region: int
    offset: int
    valid: int
    digest: int


@dataclass(frozen=True, slots=True)
class PushNotice:
    """Travels with the bytes of one (chunk, layer) of one landing. Size-bounded: see wire.frames."""

    landing: int
    request: RequestId
    attempt: int
    chunk: int
    layer: int
    slices: tuple[SliceNotice, ...]


@dataclass(frozen=True, slots=True)
class Landed:
    """The store node verified these blocks' slices of one layer (``chunk`` as in the notice)."""

    landing: int
    request: RequestId
    attempt: int
    chunk: int
    layer: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A read pin on sealed slots, bound to (operation, holder session)."""

    id: int
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A mapped file of one store node: ``path`` (segment carrier), ``size`` bytes, ``slot_bytes`` per slot."""

    number: int
    path: str
    size: int
    slot_bytes: int
