"""The cluster as one process sees it, and its own place in it, whichever registry keeps the list.

Of several models' members it knows those of its own group (``cluster.groups``), unless it names no model.
While the registry is away the last known view stays. Only the event loop touches the view; a link (the embedded registry's,
or etcd's) hands it every change there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from moonpool.cluster.election import Lead
from moonpool.cluster.etcd.address import is_etcd
from moonpool.cluster.groups import belongs
from moonpool.cluster.registry_link import OnFenced, RegistryLink
from moonpool.core.config import TimingConfig
from moonpool.core.errors import NoPath
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.terms import Terms


class Link(Protocol):
    """One process's side of a registry. It watches from its making; changes and fences are told on the event loop."""

    async def join(self, member: Member) -> None:
        """Opens the session; returns once welcome. LayoutMismatch naming both values; NoPath after 10 s without an answer.

        A newer life of this process ends the older one.
        """

    def update(self, member: Member) -> None:
        """New words about the life that joined."""

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        """A death is proved. Best effort."""

    async def lead(self, member: Member, known: int, held: int) -> Lead | None:
        """Asks whether ``member``, as it joined, leads: as in ``election.Election.ask``. None without an answer. Bounded."""

    async def leave(self) -> None:
        """Ends session and watch. Bounded."""

    def numbers(self) -> dict[str, float]:
        """Gauges and counters of this side, by stable snake_case name."""


class Membership:
    """Implements ``core.membership.Peers``. ``on_fenced`` is called on the event loop: this life is over.

    ``registry``: host:port of an embedded registry, or etcd://host:port,.../prefix. ``model``: whose group this process
    belongs to; empty: it looks at everybody.
    """

    def __init__(self, registry: str, timing: TimingConfig, on_fenced: OnFenced, model: str = "") -> None:
        self._registry = registry
        self._model = model
        self._view: dict[MemberId, MemberChange] = {}
        self._subscribers: list[Callable[[MemberChange], None]] = []
        self._changed = asyncio.Event()
        self._on_fenced = on_fenced
        self._own: Member | None = None  # as it joined, and was updated
        self.terms = Terms()
        self._link = _link(registry, timing, self._apply, self._fenced)

    # Peers

    def get(self, member: MemberId) -> MemberChange | None:
        return self._view.get(member)

    def live(self, role: Role) -> list[Member]:
        found = [c.member for c in self._view.values() if c.liveness is Liveness.LIVE and c.member.role is role]
        return sorted(found, key=lambda m: m.id)

    def store_of(self, node: NodeId) -> Member | None:
        return next((m for m in self.live(Role.STORE) if m.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        for change in list(self._view.values()):
            on_change(change)
        self._subscribers.append(on_change)

        def stop() -> None:
            if on_change in self._subscribers:
                self._subscribers.remove(on_change)

        return stop

    # the session

    def everybody(self) -> list[MemberChange]:
        return sorted(self._view.values(), key=lambda c: c.member.id)

    async def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until ``condition`` holds, looking after every change. NoPath naming ``what`` when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as e:
            raise NoPath(f"no {what} within {timeout_s:.0f} s (registry {self._registry})", retry_after_s=1.0) from e

    async def join(self, member: Member) -> None:
        """Opens the session; returns once welcome. LayoutMismatch as the registry says it; NoPath after 10 s without it."""
        self._own = replace(member, term=0)
        await self._link.join(self._own)

    def update(self, member: Member) -> None:
        """New words about this life (``ready``, details); sent with the next beat, at once."""
        if self._own is not None:
            self._own = replace(member, term=self._own.term)
            self._link.update(self._own)

    # leadership, of conductors

    @property
    def life(self) -> Incarnation | None:
        """Of this process, as it joined; None before, and once it is fenced."""
        return self._own.incarnation if self._own is not None else None

    async def lead(self, held: int) -> Lead | None:
        """Asks whether this life leads, which holds the lease of term ``held`` still (0: none). None without an answer."""
        return await self._link.lead(self._own, self.terms.newest, held) if self._own is not None else None

    def say_term(self, term: int) -> None:
        """Everybody hears of it. 0: this life does not lead any more."""
        if self._own is not None and self._own.term != term:
            self._own = replace(self._own, term=term)
            self._link.update(self._own)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        """A host's agent proves a death. Best effort: without a registry nobody is asking."""
        self._link.report_gone(member, incarnation, proof)

    async def leave(self) -> None:
        """Ends the session in order (the registry then knows this life as gone) and the watch."""
        await self._link.leave()

    def numbers(self) -> dict[str, float]:
        return self._link.numbers()

    def _fenced(self, why: str, replaced: bool) -> None:
        self._own = None
        self._on_fenced(why, replaced)

    def _apply(self, change: MemberChange) -> None:
        known = self._view.get(change.member.id)
        if not belongs(change.member, self._model):
            if known is None or known.liveness is Liveness.GONE:
                return
            change = _taken(known.member, change.member)
        self.terms.heard(change.member.term)
        if known == change or (known and known.member.incarnation > change.member.incarnation):
            return
        self._view[change.member.id] = change
        self._changed.set()
        for subscriber in list(self._subscribers):
            subscriber(change)


def _taken(before: Member, by: Member) -> MemberChange:
    """The end of a life whose name went to one of another group."""
    return MemberChange(replace(before, ready=False), Liveness.GONE, f"replaced by life {by.incarnation}, of model {by.model}")


def _link(registry: str, timing: TimingConfig, heard: Callable[[MemberChange], None], on_fenced: OnFenced) -> Link:
    if is_etcd(registry):
        from moonpool.cluster.etcd.link import EtcdLink  # heavy, and not everybody's

        return EtcdLink(registry, timing, heard, on_fenced)
    return RegistryLink(registry, timing, heard, on_fenced)
