"""What operators ask of the pool: where a block is and who keeps it there, and what would go, or goes.

Pure. Nothing that is in use goes: neither a block that is pinned or held hard, nor one that has such a block after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.core.errors import InvalidRequest
from moonpool.core.events import Tier
from moonpool.core.layout import RAW, KVLayout
from moonpool.core.use import DEFAULT_TENANT
from moonpool.kvstore.codecs.copies import LOSSY, all_keys, copy_key, decoded_key
from moonpool.kvstore.pool import Cleared, Pool
from moonpool.kvstore.rows import Entry

ENDS = 256  # of one prompt, in one answer
PART = 1024  # blocks dropped in one go: some 20 ms


@dataclass(frozen=True, slots=True)
class BlockState:
    """``tiers`` is empty for a block that is not here; ``codec`` names that of a copy which stands for the full block."""

    tiers: tuple[Tier, ...] = ()
    layout: str = ""
    tenant: str = ""
    held: str = ""  # hard or soft
    codec: str = ""
    bytes: int = 0  # in one tier


@dataclass(frozen=True, slots=True)
class BlockNames:
    """A sequence from its first block on; the last one is ``tenant``'s."""

    layout: KVLayout
    tenant: str
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class TenantState:
    """Bytes of DRAM; ``quota`` 0: none. ``blocks`` are slots in DRAM, those being written included."""

    tenant: str
    used: int
    quota: int
    soft: int
    hard: int
    blocks: int


class Control:
    def __init__(self, pool: Pool) -> None:
        self._index = pool.held.index
        self._pool = pool

    # Looking.

    def state(self, key: bytes) -> BlockState:
        """Of the full block, or of a lossy copy of it where that is all there is."""
        for name in (key, *(copy_key(key, codec) for codec in LOSSY)):
            entry = self._index.get(name)
            if entry is not None:
                layout = entry.layout
                codec = "" if layout.codec == RAW else layout.codec
                return BlockState(entry.tiers, layout.fingerprint, entry.use.tenant, entry.held, codec, layout.slot_bytes)
        return BlockState()

    def sequences(self, keys: Sequence[bytes], following: bool) -> tuple[list[BlockNames], bool]:
        """What has to be elsewhere so that the leading ``keys`` that are here are there: the full blocks, and where more of
        the sequence has a lossy copy the copies. With ``following`` what continues the last one, too: a sequence for each
        end. The flag: there are more than ``ENDS`` of them.
        """
        out: list[BlockNames] = []
        longest = 0
        for names in (list(keys), *([copy_key(key, codec) for key in keys] for codec in LOSSY)):
            leading = len(self._index.leading(names))
            if leading > longest:
                longest = leading
                out += self._paths(names[:leading]) if following else [self._names(names[:leading])]
        return out[:ENDS], len(out) > ENDS

    def _names(self, keys: list[bytes]) -> BlockNames:
        accounts, row = self._pool.held.accounts, self._index.leading(keys)[-1]
        account = self._index.account[row]
        return BlockNames(accounts.layout_of[account], accounts.tenant_of[account], keys)

    def _paths(self, chain: list[bytes]) -> list[BlockNames]:
        """``chain`` with each way on from its end."""
        index = self._index
        out: list[BlockNames] = []
        for row in index.descending(chain[-1:]):
            if not any(True for _ in index.children(row)) and len(out) <= ENDS:
                path: list[bytes] = []
                while index.key[row] != chain[-1]:
                    path.append(index.key[row])
                    row = index.parent[row]
                out.append(self._names([*chain, *reversed(path)]))
        return out

    def after(self, key: bytes) -> list[bytes]:
        """What continues ``key``, parents first."""
        return [self._index.key[row] for row in self._index.descending([key])][1:]

    def layouts(self) -> list[tuple[KVLayout, int]]:
        """What is registered, with how many slots hold it."""
        accounts = self._pool.held.accounts
        count: Counter[str] = Counter()
        for layout, slots in zip(accounts.layout_of, accounts.slots_of, strict=True):
            count[layout.fingerprint] += slots
        return [(layout, count[name]) for name, layout in accounts.layouts.items()]

    def tenants(self) -> list[TenantState]:
        """Everybody who has stored or held something, or has a quota."""
        accounts, holds, out = self._pool.held.accounts, self._pool.holds, []
        known = dict.fromkeys(holds.tenants(), (0, None)) | self._pool.quotas()
        for tenant, (used, quota) in sorted(known.items()):
            blocks = sum(accounts.slots_of[account] for account in accounts.of_tenant(tenant))
            soft, hard = holds.bytes_of(tenant)
            if used or quota or soft or hard:
                out.append(TenantState(tenant, used, quota or 0, soft, hard, blocks))
        return out

    # Changing.

    def hold(self, tenant: str, keys: Sequence[bytes], hard: bool, now: float) -> int:
        """Hold the leading ``keys`` that are in DRAM, and where only lossy copies are left the copies. How many are held.

        Busy, with the numbers, above the share that may be held.
        """
        held = self._pool.hold(tenant, keys, hard, now)
        for codec in LOSSY:
            if held < len(keys) and self._index.get(copy_key(keys[held], codec)) is not None:
                held = max(held, self._pool.hold(tenant, [copy_key(key, codec) for key in keys], hard, now))
        return held

    def unhold(self, tenant: str, keys: Sequence[bytes], now: float) -> int:
        """How many of ``keys`` the tenant held, in whatever form."""
        return sum(self._pool.unhold(tenant, all_keys(key), now) > 0 for key in keys)

    def set_quota(self, tenant: str, limit: int, dry_run: bool) -> tuple[int, int]:
        """(quota before, bytes filled); 0: none. InvalidRequest: the default tenant has none."""
        if tenant == DEFAULT_TENANT:
            raise InvalidRequest(f"tenant: {tenant!r} is whoever names none, and has no quota; name another", param="tenant")
        used, before = self._pool.quotas().get(tenant, (0, None))
        if not dry_run:
            self._pool.set_quota(tenant, limit or None)
        return before or 0, used

    def drop(self, keys: Iterable[bytes], dry_run: bool) -> Cleared:
        """Drop exactly ``keys``. One that is in use, or that other blocks follow, stays."""
        meant = {key: entry for key in keys if (entry := self._index.get(key)) is not None}
        following = {key: len(entry.children) for key, entry in meant.items()}
        leaves = [entry for key, entry in meant.items() if not following[key]]
        gone: list[Entry] = []
        while leaves:
            entry = leaves.pop()
            if entry.pins or entry.held == "hard":
                continue
            gone.append(entry)
            if entry.parent in following:
                following[entry.parent] -= 1
                if not following[entry.parent]:
                    leaves.append(meant[entry.parent])
        if not dry_run:
            for entry in gone:
                self._pool.held.withdraw(entry.key)
        size = sum(entry.layout.slot_bytes * len(entry.tiers) for entry in gone)
        return Cleared(len(gone), len(meant) - len(gone), size)

    def clean(self, keys: Sequence[bytes], dry_run: bool) -> Cleared:
        """Drop ``keys`` and their lossy copies with all that follows them, and what was decoded from it."""
        index = self._index
        rows = index.descending(name for key in keys for name in all_keys(key))
        names = [index.key[row] for row in rows]
        return self._pool.clear([*names, *map(decoded_key, names)], dry_run=dry_run)

    def clean_all(self, model: str, tenant: str, dry_run: bool) -> Iterator[Cleared]:
        """Drop all blocks of ``model`` (by its fingerprint, or that of one layout) and of ``tenant``, where these are named.

        In parts, each of which takes some milliseconds: what comes between two of them may use blocks of the parts to come.
        """
        if dry_run:
            yield self._pool.clear(model=model, tenant=tenant, dry_run=True)
            return
        keys = list(filter(lambda key: self._is_of(key, model, tenant), self._index.keys()))
        for end in range(len(keys), 0, -PART):  # children come after their parents
            part = keys[max(end - PART, 0) : end]
            gone = self._pool.clear(part, model=model, tenant=tenant)
            yield replace(gone, kept=len(part) - gone.cleared)  # what follows the part was counted with another one

    def _is_of(self, key: bytes, model: str, tenant: str) -> bool:
        row, accounts = self._index.row(key), self._pool.held.accounts
        if row is None:
            return False
        layout, owner = accounts.layout_of[self._index.account[row]], accounts.tenant_of[self._index.account[row]]
        return (not tenant or owner == tenant) and (not model or model in (layout.model, layout.fingerprint))
