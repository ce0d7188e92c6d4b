"""Whose blocks of which layout: what is registered, who has filled how much, and how much each may fill.

An account is a (layout, tenant) pair as a small int, because every block has one. Bytes are those of DRAM slots, reserved
and fenced ones included; a block is its first writer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.core.errors import LayoutMismatch
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import DEFAULT_TENANT

LAYOUTS = 1024  # registered at one node; more would be somebody's mistake, or malice
ACCOUNTS = 1 << 16  # beyond these, blocks of further tenants are the default tenant's


class Accounts:
    def __init__(self, node: NodeId, quotas: Mapping[str, int]) -> None:
        self._node = node
        self.layouts: dict[str, KVLayout] = {}  # by fingerprint
        self.quotas = {tenant: limit for tenant, limit in quotas.items() if tenant != DEFAULT_TENANT}  # bytes, by tenant
        self.layout_of: list[KVLayout] = []  # these four by account
        self.tenant_of: list[str] = []
        self.size_of: list[int] = []  # bytes of a slot
        self.slots_of: list[int] = []  # slots in DRAM
        self._numbers: dict[tuple[str, str], int] = {}  # by (fingerprint, tenant)

    def register(self, layout: KVLayout, who: str) -> bool:
        """Whether the layout is new here. LayoutMismatch, with both values, where its model is known in another shape."""
        if self.layouts.get(layout.fingerprint) == layout:
            return False
        name = (layout.model, layout.dtype, layout.order, layout.codec)
        for known in self.layouts.values():
            if (known.model, known.dtype, known.order, known.codec) == name:
                known.require_same(layout, who)
        if len(self.layouts) >= LAYOUTS:
            raise LayoutMismatch(f"node {self._node} knows {LAYOUTS} KV layouts, and takes no more until it is restarted")
        self.layouts[layout.fingerprint] = layout
        self._open(layout, DEFAULT_TENANT)
        return True

    def layout(self, fingerprint: str) -> KVLayout:
        """LayoutMismatch, naming what is registered, where this one is not."""
        known = self.layouts.get(fingerprint)
        if known is None:
            here = ", ".join(f"{one.fingerprint} (model {one.model})" for one in self.layouts.values()) or "none"
            raise LayoutMismatch(f"KV layout {fingerprint} is not registered at node {self._node}; it has {here}")
        return known

    def number(self, layout: KVLayout, tenant: str) -> int:
        """The account of a registered layout. LayoutMismatch for another one."""
        found = self._numbers.get((layout.fingerprint, tenant))
        if found is not None:
            return found
        self.layout(layout.fingerprint)
        if len(self.layout_of) >= ACCOUNTS - LAYOUTS:
            return self._numbers[layout.fingerprint, DEFAULT_TENANT]
        return self._open(layout, tenant)

    def _open(self, layout: KVLayout, tenant: str) -> int:
        number = self._numbers[layout.fingerprint, tenant] = len(self.layout_of)
        self.layout_of.append(layout)
        self.tenant_of.append(tenant)
        self.size_of.append(layout.slot_bytes)
        self.slots_of.append(0)
        return number

    def of_tenant(self, tenant: str) -> list[int]:
        return [number for (_, name), number in self._numbers.items() if name == tenant]

    def of_layout(self, fingerprint: str) -> Sequence[int]:
        return [number for number, layout in enumerate(self.layout_of) if layout.fingerprint == fingerprint]

    def filled(self, tenant: str) -> int:
        """Bytes."""
        return sum(self.slots_of[number] * self.size_of[number] for number in self.of_tenant(tenant))

    def over(self, account: int, n: int) -> int:
        """Bytes by which the tenant would be over its quota with ``n`` more slots; 0 or less where it would not be."""
        tenant = self.tenant_of[account]
        quota = self.quotas.get(tenant)
        return 0 if quota is None else self.filled(tenant) + n * self.size_of[account] - quota

    def set_quota(self, tenant: str, limit: int | None) -> None:
        """``limit`` bytes from now on; None: as much as there is. What is filled already stays until room is needed."""
        if limit is None:
            self.quotas.pop(tenant, None)
        elif tenant != DEFAULT_TENANT:
            self.quotas[tenant] = limit
