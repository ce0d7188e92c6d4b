"""Which blocks to copy to whom: what only one node holds, hottest first, parents before children. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.core.ids import NodeId


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is here. ``used``: when last, on any one clock."""

    key: bytes
    parent: bytes | None
    used: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that follow one another and that nobody else has. ``path``: all keys from the sequence's first block on."""

    keys: tuple[bytes, ...]
    path: tuple[bytes, ...]


@dataclass(slots=True)
class Room:
    """What a node said of itself, kept up to date as blocks go there: ``has`` of the keys asked for, and bytes of DRAM.

    Of what it could evict half counts: with like loads, the hotter half of a leaving node's blocks is worth more than
    the colder half of another one's, but not more than that.
    """

    node: NodeId
    free: int
    evictable: int
    has: set[bytes]

    @property
    def budget(self) -> int:
        return self.free + self.evictable // 2

    def lacks(self, path: Iterable[bytes], size: Mapping[bytes, int]) -> int:
        """Bytes."""
        return sum(size[key] for key in path if key not in self.has)

    def took(self, keys: Iterable[bytes], bytes: int) -> None:
        self.has.update(keys)
        self.evictable = max(0, self.evictable - max(0, bytes - self.free))
        self.free = max(0, self.free - bytes)


def path_to(key: bytes, parents: Mapping[bytes, bytes | None]) -> tuple[bytes, ...]:
    """From the first block of its sequence down to ``key``; empty where a block between is not in ``parents``."""
    out: list[bytes] = []
    at: bytes | None = key
    while at is not None:
        if at not in parents or len(out) > len(parents):
            return ()
        out.append(at)
        at = parents[at]
    return tuple(reversed(out))


def pieces(blocks: Sequence[Block], elsewhere: Container[bytes], most: int) -> list[Piece]:
    """All of ``blocks`` that are not ``elsewhere``, as runs of at most ``most``. ``blocks`` has parents before children.

    A block is as hot as its hottest descendant, so a run never comes before the run it hangs on. A run follows the
    hottest child.
    """
    parents = {block.key: block.parent for block in blocks}
    heat: dict[bytes, float] = {}
    for block in reversed(blocks):
        heat[block.key] = max(block.used, heat.get(block.key, block.used))
        if block.parent is not None:
            heat[block.parent] = max(heat.get(block.parent, heat[block.key]), heat[block.key])
    run_of: dict[bytes, int] = {}  # of a run's last block so far
    runs: list[list[bytes]] = []
    for block in sorted(blocks, key=lambda block: -heat[block.key]):  # stable: parents stay before children
        if block.key in elsewhere:
            continue
        run = None if block.parent is None else run_of.pop(block.parent, None)
        if run is None or len(runs[run]) >= most:
            run = len(runs)
            runs.append([])
        runs[run].append(block.key)
        run_of[block.key] = run
    found = [Piece(tuple(keys), path_to(keys[-1], parents)) for keys in runs]
    return [piece for piece in found if piece.path]


def least_to_move(rooms: Iterable[Room], path: Sequence[bytes], size: Mapping[bytes, int]) -> Room | None:
    """Of those with room for what they lack of ``path``, who lacks least; then who has most room."""
    return min(_fitting(rooms, path, size), key=lambda r: (r.lacks(path, size), -r.budget, r.node), default=None)


def most_room(rooms: Iterable[Room], path: Sequence[bytes], size: Mapping[bytes, int]) -> Room | None:
    """Of those that lack some of ``path`` and have room for it, who has most room."""
    return min(_fitting(rooms, path, size), key=lambda r: (-r.budget, r.node), default=None)


def _fitting(rooms: Iterable[Room], path: Sequence[bytes], size: Mapping[bytes, int]) -> list[Room]:
    return [room for room in rooms if 0 < room.lacks(path, size) <= room.budget]
