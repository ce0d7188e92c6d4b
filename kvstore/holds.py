"""Blocks that somebody wants kept, by name and for no session: softly (evicted last) or hard (never evicted).

A tenant's holds are remembered by key. A hold ends when it is taken back, or when its block goes: softly held blocks may
be evicted when nothing else is left, and bad copies are withdrawn whoever holds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.errors import Busy
from moonpool.kvstore.holdings import Holdings
from moonpool.kvstore.rows import HARD, SOFT


class Holds:
    """``hard_share`` of a node's bytes may be held hard in all, ``soft_share`` softly by each tenant."""

    def __init__(self, holdings: Holdings, hard_share: float, soft_share: float) -> None:
        self._held = holdings
        self._hard_share = hard_share
        self._soft_share = soft_share
        self._by: dict[bool, dict[str, dict[bytes, None]]] = {True: {}, False: {}}  # hard or not; tenant; keys

    def hold(self, tenant: str, keys: Sequence[bytes], hard: bool) -> int:
        """Hold the leading ``keys`` that are in DRAM; returns how many these are. A key held before is held as said now.

        Busy, with the numbers, where the node (hard) or the tenant (soft) would hold more than its share: then nothing
        changes.
        """
        rows = self._held.leading(keys, "")
        if not rows:
            return 0
        index = self._held.index
        names = [index.key[row] for row in rows]
        self._prune()
        mine = self._by[hard].get(tenant, {})
        have = self._held_bytes(hard, None if hard else tenant)
        fresh = [key for key in names if key not in mine and not (hard and self._is_held(key, True))]
        more = sum(self._bytes(key) for key in fresh)
        limit = int((self._hard_share if hard else self._soft_share) * self._held.slots.total_bytes)
        if have + more > limit:
            who, field = ("node " + self._held.node, "hard_pin_share") if hard else ("tenant " + tenant, "soft_pin_share")
            raise Busy(
                f"{who} holds {have} bytes {'hard' if hard else 'softly'}, and {more} more are above the {limit} bytes that "
                f"store.{field} allows; unpin some first, or raise it",
                peer=self._held.node,
            )
        self._by[hard].setdefault(tenant, {}).update(dict.fromkeys(names))
        self._forget(not hard, tenant, names)
        self._mark(names)
        return len(rows)

    def unhold(self, tenant: str, keys: Sequence[bytes] | None) -> int:
        """Take back the tenant's holds on ``keys`` (None: all of them). Returns how many there were."""
        names = list(keys) if keys is not None else [*self._by[True].get(tenant, ()), *self._by[False].get(tenant, ())]
        ended = self._forget(True, tenant, names) + self._forget(False, tenant, names)
        self._mark(names)
        return ended

    def _forget(self, hard: bool, tenant: str, keys: Sequence[bytes]) -> int:
        mine = self._by[hard].get(tenant, {})
        gone = [key for key in keys if key in mine]
        for key in gone:
            del mine[key]
        if not mine:
            self._by[hard].pop(tenant, None)
        return len(gone)

    def _is_held(self, key: bytes, hard: bool) -> bool:
        return any(key in mine for mine in self._by[hard].values())

    def _mark(self, keys: Sequence[bytes]) -> None:
        """Tell the index who holds these now."""
        index = self._held.index
        for key in keys:
            hard, soft = self._is_held(key, True), self._is_held(key, False)
            if soft:
                self._held.soft[key] = None
            else:
                self._held.soft.pop(key, None)
            row = index.row(key)
            if row is not None:
                index.hold(row, hard, soft)

    def _prune(self) -> None:
        """Forget holds whose block is gone, or is another copy that came later."""
        index = self._held.index
        for hard, flag in ((True, HARD), (False, SOFT)):
            for tenant, mine in list(self._by[hard].items()):
                gone = [key for key in mine if (row := index.row(key)) is None or not index.flags[row] & flag]
                self._forget(hard, tenant, gone)
                for key in gone:
                    self._held.soft.pop(key, None)

    def _bytes(self, key: bytes) -> int:
        index = self._held.index
        row = index.row(key)
        return 0 if row is None else self._held.accounts.size_of[index.account[row]]

    def _held_bytes(self, hard: bool, tenant: str | None) -> int:
        """Held by a tenant, or by anybody: each block once."""
        keys: dict[bytes, None] = {}
        for name, mine in self._by[hard].items():
            if tenant is None or name == tenant:
                keys |= mine
        return sum(map(self._bytes, keys))

    def tenants(self) -> set[str]:
        return {tenant for by in self._by.values() for tenant in by}

    def bytes_of(self, tenant: str) -> tuple[int, int]:
        """Bytes that the tenant holds softly, and hard."""
        self._prune()
        return self._held_bytes(False, tenant), self._held_bytes(True, tenant)

    def numbers(self) -> dict[str, float]:
        self._prune()
        hard = self._held_bytes(True, None)
        return {
            "held_hard_bytes": hard,
            "held_soft_bytes": self._held_bytes(False, None),
            "held_hard_blocks": len(set().union(*self._by[True].values())),
            "held_soft_blocks": len(set().union(*self._by[False].values())),
        }
