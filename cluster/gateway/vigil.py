"""Notices soon that a conductor with which requests wait is gone, frozen or cut off.

One question at a time for each conductor, however many requests wait with it, and none while nobody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb

PERIOD_S = 0.5  # between two questions; with ``place_timeout_ms`` for the answer a loss is noticed within 1.5 s

Stub = Callable[[str], Any]


class Vigil:
    """Over one life of one conductor. ``lost`` is set once and for all."""

    def __init__(self, conductor: Member, stub: Any, limit_s: float) -> None:
        self.conductor = conductor
        self.lost = asyncio.Event()
        self.waiting = 0
        self._stub = stub
        self._limit_s = limit_s
        self._task = asyncio.create_task(self._ask(), name=f"vigil-{conductor.id}")

    async def _ask(self) -> None:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self._stub.Alive(pb.types.Empty(), timeout=self._limit_s)
        except grpc.aio.AioRpcError:
            self.lost.set()

    def heard(self, change: MemberChange) -> None:
        """The registry often knows first."""
        older = change.member.incarnation < self.conductor.incarnation
        same = change.member.incarnation == self.conductor.incarnation and change.liveness is Liveness.LIVE
        if not (older or same):
            self.lost.set()

    def end(self) -> None:
        self._task.cancel()


class Vigils:
    """The vigils of one gateway, by conductor address; each lasts as long as somebody waits there."""

    def __init__(self, stub: Stub, limit_s: float) -> None:
        self._stub = stub
        self._limit_s = limit_s
        self._kept: dict[str, Vigil] = {}

    @property
    def waiting(self) -> int:
        """Requests that stand in a conductor's queue."""
        return sum(vigil.waiting for vigil in self._kept.values())

    def on_change(self, change: MemberChange) -> None:
        if change.member.role is Role.CONDUCTOR:
            for vigil in self._kept.values():
                if vigil.conductor.id == change.member.id:
                    vigil.heard(change)

    @contextmanager
    def over(self, conductor: Member) -> Iterator[asyncio.Event]:
        """An event that says: it will not answer any more."""
        vigil = self._kept.get(conductor.address)
        if vigil is None or vigil.lost.is_set():
            vigil = self._kept[conductor.address] = Vigil(conductor, self._stub(conductor.address), self._limit_s)
        vigil.waiting += 1
        try:
            yield vigil.lost
        finally:
            vigil.waiting -= 1
            if not vigil.waiting:
                vigil.end()
                if self._kept.get(conductor.address) is vigil:
                    del self._kept[conductor.address]
