"""What moves between the DRAM and the SSD of one node: blocks on their way down, and on their way up."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use


@dataclass(frozen=True, slots=True)
class Demotion:
    """A sealed block that only DRAM has. Pinned until ``Pool.demoted(id, extent)`` says where it was written, if it was."""

    id: int
    key: bytes
    parent: bytes | None
    layout: KVLayout
    slot: SlotRef
    use: Use


@dataclass(frozen=True, slots=True)
class Promotion:
    """A reserved slot for a block that lies at ``extent`` only. Both are held until ``Pool.promoted(id, ok)``."""

    id: int
    key: bytes
    layout: KVLayout
    slot: SlotRef
    extent: int
