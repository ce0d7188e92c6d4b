"""Everybody's keys, followed without gaps, and the verdicts over those whose lease lapsed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Book
from moonpool.cluster.etcd.client import Compacted, Etcd, Put
from moonpool.cluster.etcd.records import encode
from moonpool.cluster.etcd.trust import Trust
from moonpool.core.membership import MemberChange

REREAD_S = 30.0  # what a watch should never have missed is read again this often


class Watch:
    """A watch without any answer for ``quiet_s`` hangs.

    ``heard`` gets every change. ``looked`` is called whenever ``book`` may say something new.
    """

    def __init__(
        self,
        address: EtcdAddress,
        book: Book,
        trust: Trust,
        beat_s: float,
        quiet_s: float,
        heard: Callable[[MemberChange], None],
        looked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._book, self._trust = address, book, trust
        self._beat_s, self._quiet_s = beat_s, quiet_s
        self._heard, self._looked, self._clock = heard, looked, clock

    async def begin(self, etcd: Etcd) -> int:
        """Reads everything, which may be less than before; returns where the watch has to go on."""
        items, revision = await etcd.read(self._address.everything)
        self._hear(self._book.restart(items, revision))
        return revision + 1

    async def follow(self, etcd: Etcd, revision: int) -> None:
        """Every change from ``revision`` on, until the connection fails (Away)."""
        while True:
            try:
                async with aclosing(etcd.watch(self._address.everything, revision, self._beat_s, self._quiet_s)) as changes:
                    async for items in changes:
                        for item in items:
                            self._hear(self._book.event(item))
            except Compacted:
                revision = await self.begin(etcd)

    async def reread(self, etcd: Etcd) -> None:
        while True:
            await asyncio.sleep(REREAD_S * random.uniform(0.5, 1.0))
            items, revision = await etcd.read(self._address.everything)
            if revision >= self._book.seen:  # otherwise the watch is ahead of it
                self._hear(self._book.restart(items, revision))

    async def judge(self, etcd: Etcd) -> None:
        """Declares silent whose lease lapsed. All watchers do; the first one's word stands, and all hear it."""
        while True:
            await asyncio.sleep(self._beat_s)
            for verdict in self._book.verdicts() if self._trust.may_judge(self._clock()) else ():
                member = verdict.change.member.id
                life, beat = self._address.life(member), self._address.beat(member)
                expected = {life: verdict.revision, beat: 0} if verdict.lapsed else {life: verdict.revision}
                await etcd.put_if(expected, [Put(life, encode(verdict.change))], () if verdict.lapsed else (beat,))

    def _hear(self, changes: list[MemberChange]) -> None:
        for change in changes:
            self._heard(change)
        self._looked()
