"""Sets of holders, each kept once however many blocks it holds: a block costs a small number, not a mask.

Blocks stored and evicted together have the same holders, so there are far fewer sets than blocks. A set is numbered from
1; 0 is the empty one. Numbers are plain ints shared by all entries that refer to them, which keeps a table of millions of
them out of the garbage collector's way.
"""

from __future__ import annotations

import sys

NOBODY = 0
Levels = tuple[int, ...]  # a mask of holders for each tier, the fastest first, none empty at the end


class HolderSets:
    """``any[n]``: the holders in set ``n``, in whatever tier, as a mask. ``at[n]``: by tier."""

    def __init__(self) -> None:
        self.any: list[int] = [0]
        self.at: list[Levels] = [()]
        self._blocks: list[int] = [0]  # that refer to the set
        self._number: dict[Levels, int] = {(): NOBODY}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._number)

    def adding(self, number: int, level: int, bit: int) -> int:
        """The set that ``number`` becomes when ``bit`` holds it in tier ``level``, too."""
        at = self.at[number]
        if level < len(at):
            return number if at[level] & bit else self._of((*at[:level], at[level] | bit, *at[level + 1 :]))
        return self._of((*at, *(0,) * (level - len(at)), bit))

    def lacking(self, number: int, level: int, bit: int) -> int:
        """The set that ``number`` becomes when ``bit`` does not hold it in tier ``level`` any more."""
        at = self.at[number]
        if level >= len(at) or not at[level] & bit:
            return number
        return self._of(_trimmed([*at[:level], at[level] & ~bit, *at[level + 1 :]]))

    def without(self, number: int, bits: int) -> int:
        """The set that ``number`` becomes without these holders."""
        return self._of(_trimmed([mask & ~bits for mask in self.at[number]])) if self.any[number] & bits else number

    def moved(self, old: int, new: int, blocks: int) -> None:
        """So many blocks that referred to ``old`` refer to ``new`` now. A set that nobody refers to any more is forgotten."""
        self._blocks[new] += blocks
        self._blocks[old] -= blocks
        if old and not self._blocks[old]:
            del self._number[self.at[old]]
            self.at[old], self.any[old] = (), 0
            self._free.append(old)

    def memory_bytes(self) -> int:
        """Of all that is kept here: the tables, and what they refer to, once."""
        tables = (self.any, self.at, self._blocks, self._number)
        things = [*tables, *self.at, *self.any, *self._blocks, *(mask for at in self.at for mask in at), *self._number.values()]
        return sum({id(thing): allocated(thing) for thing in things}.values())

    def _of(self, at: Levels) -> int:
        number = self._number.get(at)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
        else:
            number = len(self.any)
            for column in (self.any, self._blocks):
                column.append(0)
            self.at.append(())
        self._number[at] = number
        self.at[number] = at
        self.any[number] = at[0] if len(at) == 1 else _union(at)
        return number


def allocated(thing: object) -> int:
    """Bytes that the allocator gives for it: a multiple of 16."""
    return -(-sys.getsizeof(thing) // 16) * 16


def _trimmed(at: list[int]) -> Levels:
    while at and not at[-1]:
        at.pop()
    return tuple(at)


def _union(at: Levels) -> int:
    mask = 0
    for level in at:
        mask |= level
    return mask
