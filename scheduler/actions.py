"""What a conductor wants done. Whether it was done comes back as an event, or not at all: all of it is soft."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.placement import Placement, Refusal


@dataclass(frozen=True, slots=True)
class Resync:
    """Events of ``holder``'s store node are missing: watch it anew, beginning with a snapshot."""

    holder: NodeId


@dataclass(frozen=True, slots=True)
class Bound:
    """The answer to a ``place`` that was told to wait."""

    request: str
    attempt: int
    answer: Placement | Refusal


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy these leading blocks of one prompt from ``source`` to ``target``."""

    source: NodeId
    target: NodeId
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring these leading blocks of one prompt from ``node``'s SSD into its DRAM: they will be wanted soon."""

    node: NodeId
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cool:
    """``node``'s copies of these blocks are the first to be evicted: they live elsewhere now."""

    node: NodeId
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Drain ``worker`` and let it come back as a new life in ``role``."""

    worker: MemberId
    role: Role


Action = Resync | Bound | Replicate | Prefetch | Cool | SwitchRole
