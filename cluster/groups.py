"""Model groups: the conductors, workers and store nodes of one model, of a membership that several models share. Pure.

Whoever places, moves or pools KV looks at members of its own group only. Gateways belong to every group: each serves
several models. Who names no model (a store node that is there for users of the library) belongs to every group, too.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Member, MemberChange, Peers


def belongs(member: Member, model: str) -> bool:
    """Whether who serves ``model`` (empty: all of them) has to do with ``member``."""
    return not model or not member.model or member.role is Role.GATEWAY or member.model == model


class Group:
    """``peers``, of one model. Implements ``core.membership.Peers``."""

    def __init__(self, peers: Peers, model: str) -> None:
        self._peers, self._model = peers, model

    def get(self, member: MemberId) -> MemberChange | None:
        change = self._peers.get(member)
        return change if change is not None and belongs(change.member, self._model) else None

    def live(self, role: Role) -> list[Member]:
        return [member for member in self._peers.live(role) if belongs(member, self._model)]

    def store_of(self, node: NodeId) -> Member | None:
        return next((member for member in self.live(Role.STORE) if member.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        def heard(change: MemberChange) -> None:
            if belongs(change.member, self._model):
                on_change(change)

        return self._peers.subscribe(heard)
