"""Proof of death for every process of this machine, by pidfd: the supervisor tells the registry, whoever launched it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

from moonpool.cluster.membership import Membership
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.membership import Liveness, MemberChange


class DeathWatch:
    """Holds one pidfd per live member of ``nodes``, those of this machine: another machine's pids mean nothing here.

    A pidfd becomes readable when its process ends, and never names another one.
    """

    def __init__(self, peers: Membership, nodes: Collection[NodeId]) -> None:
        self._peers, self._nodes = peers, frozenset(nodes)
        self._held: dict[tuple[MemberId, Incarnation], int] = {}
        self._stop = peers.subscribe(self._changed)

    def close(self) -> None:
        self._stop()
        for member, incarnation in list(self._held):
            self._let_go(member, incarnation)

    def _changed(self, change: MemberChange) -> None:
        member = change.member
        if member.node not in self._nodes:
            return
        if change.liveness is Liveness.GONE:
            self._let_go(member.id, member.incarnation)
        elif change.liveness is Liveness.LIVE and (member.id, member.incarnation) not in self._held:
            try:
                held = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._dead(member.id, member.incarnation)
                return
            self._held[member.id, member.incarnation] = held
            asyncio.get_running_loop().add_reader(held, self._dead, member.id, member.incarnation)

    def _dead(self, member: MemberId, incarnation: Incarnation) -> None:
        self._let_go(member, incarnation)
        self._peers.report_gone(member, incarnation, "its process ended (pidfd)")

    def _let_go(self, member: MemberId, incarnation: Incarnation) -> None:
        held = self._held.pop((member, incarnation), None)
        if held is not None:
            asyncio.get_running_loop().remove_reader(held)
            os.close(held)
