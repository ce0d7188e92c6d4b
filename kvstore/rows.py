"""Blocks as rows of parallel arrays, because an object for each would take several times the room.

A row number is given out anew once its block is gone and nobody has it pinned. Rows know their parents and children.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonpool.core.errors import Bug
from moonpool.core.events import Tier
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.accounts import Accounts

NONE, MANY = -1, -2  # no row, slot or extent; and in ``child``: several
# Flags of a row: findable; candidate in either tier; chosen to be evicted from DRAM, but not yet; held by somebody.
FOUND, IN_DRAM, ON_SSD, CHOSEN, SOFT, HARD = 1, 2, 4, 8, 16, 32
GROW = 1024  # rows made at once, at least


@dataclass(frozen=True, slots=True)
class Entry:
    """One findable block as it was when asked for."""

    row: int
    key: bytes
    parent: bytes | None
    children: frozenset[bytes]
    layout: KVLayout
    use: Use  # of its first writer; only the tenant is remembered
    used: float
    pins: int
    held: str  # "hard", "soft" or nothing
    slot: int | None  # None: not in DRAM
    extent: int | None  # None: not on SSD

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return (Tier.G2,) * (self.slot is not None) + (Tier.G3,) * (self.extent is not None)


class Rows:
    def __init__(self, accounts: Accounts, with_ssd: bool) -> None:
        self._accounts = accounts
        self._found: dict[bytes, int] = {}  # parents before children: both were inserted in that order
        self.key: list[bytes] = []  # these by row
        self.parent = array("i")
        self.child = array("i")  # NONE, the only child, or MANY: then they are in ``_children``
        self.slot = array("i")
        self.extent = array("q" if with_ssd else "b")  # without an SSD tier all are NONE: a byte says so
        self.account = array("H")
        self.used = array("f")
        self.flags = bytearray()
        self.pins: dict[int, int] = {}  # rows that somebody has pinned, in whatever tier; withdrawn ones, too
        self._children: dict[int, set[int]] = {}
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._found)

    def keys(self) -> Iterable[bytes]:
        return self._found.keys()

    def row(self, key: bytes) -> int | None:
        return self._found.get(key)

    def rows(self) -> list[int]:
        """Of what can be found, parents first."""
        return list(self._found.values())

    def lacks_all(self, keys: Iterable[bytes]) -> bool:
        return self._found.keys().isdisjoint(keys)

    def leading(self, keys: Iterable[bytes]) -> list[int]:
        """Rows of the leading keys that are here, in any tier."""
        out, get = [], self._found.get
        for key in keys:
            row = get(key)
            if row is None:
                break
            out.append(row)
        return out

    def get(self, key: bytes) -> Entry | None:
        row = self._found.get(key)
        if row is None:
            return None
        above, flags = self.parent[row], self.flags[row]
        return Entry(
            row,
            key,
            None if above < 0 else self.key[above],
            frozenset(self.key[child] for child in self.children(row)),
            self._accounts.layout_of[self.account[row]],
            Use(self._accounts.tenant_of[self.account[row]]),
            self.used[row],
            self.pins.get(row, 0),
            "hard" if flags & HARD else "soft" if flags & SOFT else "",
            self.slot[row] if self.slot[row] >= 0 else None,
            self.extent[row] if self.extent[row] >= 0 else None,
        )

    def children(self, row: int) -> Iterable[int]:
        child = self.child[row]
        if child == NONE:
            return ()
        return self._children[row] if child == MANY else (child,)

    def depth(self, row: int) -> int:
        """How many blocks come before this one."""
        depth, parent = 0, self.parent
        while (row := parent[row]) >= 0:
            depth += 1
        return depth

    def descending(self, keys: Iterable[bytes]) -> list[int]:
        """Rows of ``keys`` and of all that comes after them, each once and after what comes before it."""
        named = dict.fromkeys(row for key in keys if (row := self._found.get(key)) is not None)
        clear: set[int] = set()  # neither named themselves, nor below one that is
        out = []
        for row in named:
            path, at = [], self.parent[row]
            while at >= 0 and at not in named and at not in clear:
                path.append(at)
                at = self.parent[at]
            if at not in named:
                clear.update(path)
                out.append(row)
        for row in out:  # grows while it is read
            out.extend(self.children(row))
        return out

    def keys_in(self, tier: Tier) -> list[bytes]:
        """Parents before children."""
        where = self.slot if tier is Tier.G2 else self.extent
        return [key for key, row in self._found.items() if where[row] >= 0]

    # Rows are made.

    def _insert(self, keys: Sequence[bytes], slots: Sequence[int], account: int, now: float) -> list[int]:
        """Rows of new blocks. The caller writes who their parents and children are."""
        spare, n = self._spare, len(keys)
        while len(spare) < n:
            self._grow()
        rows = spare[: -n - 1 : -1]
        del spare[-n:]
        before = len(self._found)
        self._found.update(zip(keys, rows, strict=True))
        if len(self._found) != before + n:
            raise Bug(f"a block was sealed twice: one of {n} after {keys[0].hex()}")
        at = 0
        for upto in breaks(rows):  # usually few: rows of a sequence are given back in order
            self._fill(rows[at], keys[at:upto], slots[at:upto], account, now)
            at = upto
        return rows

    def _fill(self, row: int, keys: Sequence[bytes], slots: Sequence[int], account: int, now: float) -> None:
        """Rows from ``row`` on are these blocks."""
        n = len(keys)
        end = row + n
        self.key[row:end] = keys
        self.slot[row:end] = array("i", slots)
        self.account[row:end] = array("H", (account,)) * n
        self.used[row:end] = array("f", (now,)) * n
        self.flags[row:end] = bytes((FOUND,)) * n

    def _grow(self) -> None:
        first, more = len(self.key), max(GROW, len(self.key) // 64)
        self.key = self.key + [b""] * more  # a new list, because one that is extended takes an eighth more than it needs
        for column in (self.parent, self.child, self.slot, self.extent):
            column.extend([NONE] * more)
        self.account.extend([0] * more)
        self.used.extend([0.0] * more)
        self.flags.extend(bytes(more))
        self._spare.extend(range(first + more - 1, first - 1, -1))

    def _link(self, row: int, parent: int) -> None:
        only = self.child[parent]
        if only == NONE:
            self.child[parent] = row
        elif only == MANY:
            self._children[parent].add(row)
        else:
            self._children[parent] = {only, row}
            self.child[parent] = MANY

    def _unlink(self, row: int, parent: int) -> None:
        """``row`` is one of several children."""
        left = self._children[parent]
        left.discard(row)
        if len(left) == 1:
            self.child[parent] = left.pop()
            del self._children[parent]


def breaks(rows: Sequence[int]) -> list[int]:
    """Places after which ``rows`` do not count up by one, and the end."""
    return [at for at, (row, before) in enumerate(zip(rows[1:], rows, strict=False), 1) if row != before + 1] + [len(rows)]
