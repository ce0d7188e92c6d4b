"""This process's own place in etcd: one lease, one renewal task, the keys of its life.

Whoever watches may declare a life silent once its lease lapsed; the first to say so wins, by comparing. So this side renews
the same life under a new lease as long as nobody said so (etcd was away, not the process), and is fenced otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from moonpool.cluster.election import NOBODY, Lead
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Book, Item
from moonpool.cluster.etcd.client import Away, Etcd, LeaseLost, Put
from moonpool.cluster.etcd.records import decode, encode, name_in, over
from moonpool.cluster.etcd.standing import Bid, stand
from moonpool.cluster.roster import Fenced, require_agreement
from moonpool.core.errors import InvalidRequest, LayoutMismatch
from moonpool.core.ids import MemberId
from moonpool.core.membership import Liveness, Member, MemberChange

OnFenced = Callable[[str, bool], None]
TOMBSTONE_S = 3_600  # a life that is over is remembered this long, by those who come later
RACES = 8  # comparisons lost to others in a row before the connection is given up


class Registration:
    """``ttl_s``: of the lease; renewed three times as often. ``on_fenced``: as in ``Membership``."""

    def __init__(
        self, address: EtcdAddress, ttl_s: int, on_fenced: OnFenced, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address, self._on_fenced, self._clock = address, on_fenced, clock
        self._asked_ttl_s, self._ttl_s = ttl_s, float(ttl_s)
        self._member: Member | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._joined = False  # this life was written, at ``_written``, after it was found to agree with the others
        self._written: int | None = None  # revision; None: what etcd holds may not be what ``_member`` says
        self._lease: int | None = None
        self._renewed = 0.0  # when the last renewal that was answered was sent
        self._wake = asyncio.Event()

    # from the process

    def begin(self, member: Member) -> asyncio.Future[None]:
        """A new life; the future tells when it is welcome."""
        self._member, self._joined, self._written = member, False, None
        self._welcome = asyncio.get_running_loop().create_future()
        self._wake.set()
        return self._welcome

    def update(self, member: Member) -> None:
        if self._member is not None:
            self._member, self._written = member, None
            self._wake.set()

    @property
    def presumed_silent(self) -> bool:
        """The local deadline has passed without a renewal: others may count this life as silent by now."""
        return self._member is not None and self._joined and self._clock() > self._renewed + self._ttl_s

    async def lead(self, etcd: Etcd, known: int) -> Lead:
        """Who leads. This life does where nobody else has the lease: as long as its own lease is renewed."""
        member, lease, renewed = self._member, self._lease, self._renewed
        if member is None or lease is None or self._written is None:
            return NOBODY
        seat = self._address.leader(member.model)
        leader = await etcd.get(seat)
        newest = await etcd.get(self._address.term)
        said = stand(self._address, member, known, leader, newest)
        if isinstance(said, Bid):
            puts = [Put(seat, said.leader, lease), Put(self._address.term, said.newest)]
            if await etcd.put_if(said.expected, puts) is None:
                return NOBODY
            said = Lead(member.id, member.incarnation, said.term, 0.0)
        own = (said.leader, said.incarnation) == (member.id, member.incarnation)
        return replace(said, lease_s=max(renewed + self._ttl_s - self._clock(), 0.0) if own else 0.0)

    # while a connection lasts

    async def keep(self, etcd: Etcd) -> None:
        """Grants, renews and registers until the connection fails (Away)."""
        self._written = None  # etcd may have been emptied, or set back to a backup
        while True:
            self._wake.clear()
            try:
                await self._once(etcd)
            except LeaseLost:
                self._lease, self._written = None, None
                continue
            except Fenced as e:
                self._fence(str(e), e.replaced)
            except LayoutMismatch as e:
                self._refuse(e)
            try:
                async with asyncio.timeout(self._ttl_s / 3):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def check(self, book: Book) -> None:
        """What the watch says of this name: fenced, or no longer there as it was written."""
        if self._member is None or not self._joined:
            return
        record = book.record(self._member.id)
        if record is not None and record.change.member.incarnation >= self._member.incarnation:
            try:
                _require_mine(record.change, self._member)
            except Fenced as e:
                self._fence(str(e), e.replaced)
                return
        caught_up = self._written is not None and book.seen >= self._written
        if caught_up and (record is None or not record.revision or not book.beats(self._member.id)):
            self._written = None
            self._wake.set()

    async def leave(self, etcd: Etcd) -> None:
        """Says that this life left in order. After ``keep`` has ended."""
        member, self._member = self._member, None
        if member is not None and self._lease is not None:
            await end_life(etcd, self._address, over(member, Liveness.GONE, "left"))
        if self._lease is not None:
            await etcd.revoke(self._lease)

    async def _once(self, etcd: Etcd) -> None:
        if self._member is None:
            return
        sent = self._clock()
        if self._lease is None:
            self._lease, self._ttl_s = await etcd.grant(self._asked_ttl_s)
        else:
            await etcd.renew(self._lease)
        self._renewed = sent
        member = self._member
        if self._written is None and member is not None:  # fenced meanwhile
            try:
                await self._register(etcd, member, self._lease)
            except (Fenced, LayoutMismatch):
                if self._is_life_of(member):
                    raise
                # else the watch said so first, and what is found of that life is not to be said of the next one

    async def _register(self, etcd: Etcd, member: Member, lease: int) -> None:
        for _ in range(RACES):
            mine = self._require_room(await self._others(etcd, member), member)
            life, beat = self._address.life(member.id), self._address.beat(member.id)
            puts = [Put(life, encode(MemberChange(member, Liveness.LIVE))), Put(beat, str(member.incarnation).encode(), lease)]
            written = await etcd.put_if({life: mine}, puts)
            if written is not None:
                break
        else:
            raise Away(f"{member.id}: its record kept changing")
        if not self._joined:
            await self._require_still_agreed(etcd, member)
        if not self._is_life_of(member):  # fenced, or left, meanwhile
            return
        self._joined = True
        if self._member is member:
            self._written = written
        if self._welcome and not self._welcome.done():
            self._welcome.set_result(None)

    async def _others(self, etcd: Etcd, member: Member) -> list[Item]:
        """What this registration has to look at: for a new life everybody, otherwise its own record."""
        if not self._joined:
            return (await etcd.read(self._address.everything))[0]
        own = await etcd.get(self._address.life(member.id))
        return [own] if own else []

    def _require_room(self, items: list[Item], member: Member) -> int:
        """The revision that this name's record must still have. Fenced, or LayoutMismatch where it is a new life."""
        mine = next((item for item in items if item.key == self._address.life(member.id)), None)
        known = _lives(self._address, [mine] if mine else [])
        if member.id in known:
            _require_mine(known[member.id], member)
        if not self._joined:
            require_agreement(member, _beating(self._address, items))
        return mine.revision if mine else 0

    async def _require_still_agreed(self, etcd: Etcd, member: Member) -> None:
        """Of two that disagree and came at the same instant at least the later one sees the other now, and takes itself out."""
        items, _ = await etcd.read(self._address.everything)
        try:
            require_agreement(member, _beating(self._address, items))
        except LayoutMismatch:
            await end_life(etcd, self._address, over(member, Liveness.GONE, "refused"))
            raise

    def _is_life_of(self, member: Member) -> bool:
        return self._member is not None and self._member.incarnation == member.incarnation

    def _fence(self, why: str, replaced: bool) -> None:
        self._member, self._joined, self._written = None, False, None
        if self._welcome and not self._welcome.done() and not replaced:
            self._welcome.set_result(None)  # it was written, and is over before that was heard: nothing is left to wait for
        self._on_fenced(why, replaced)

    def _refuse(self, error: LayoutMismatch) -> None:
        self._member, self._written = None, None
        if self._welcome and not self._welcome.done():
            self._welcome.set_exception(error)


async def end_life(etcd: Etcd, address: EtcdAddress, change: MemberChange) -> None:
    """Writes that a life is over, unless a newer one has the name or it is known already."""
    member = change.member
    tombstone: int | None = None
    for _ in range(RACES):
        item = await etcd.get(address.life(member.id))
        known = _lives(address, [item] if item else []).get(member.id)
        if known and (known.member.incarnation != member.incarnation or known.liveness is Liveness.GONE):
            return
        tombstone = tombstone or (await etcd.grant(TOMBSTONE_S))[0]
        put = Put(address.life(member.id), encode(change), tombstone)
        if await etcd.put_if({put.key: item.revision if item else 0}, [put], [address.beat(member.id)]) is not None:
            return
    raise Away(f"{member.id}: its record kept changing")


def _lives(address: EtcdAddress, items: list[Item]) -> dict[MemberId, MemberChange]:
    found = {}
    for item in items:
        name = name_in(item.key, address.lives)
        try:
            if name is not None:
                found[name] = decode(name, item.value or b"")
        except InvalidRequest:  # counted where it is watched
            continue
    return found


def _beating(address: EtcdAddress, items: list[Item]) -> list[MemberChange]:
    """Those with a lease: records of others may be what a cluster of yesterday left."""
    beats = {name_in(item.key, address.beats) for item in items}
    return [change for member, change in _lives(address, items).items() if member in beats]


def _require_mine(known: MemberChange, member: Member) -> None:
    if known.member.incarnation > member.incarnation:
        raise Fenced(f"{member.id}: a newer life ({known.member.incarnation}) took the name", replaced=True)
    if known.member.incarnation == member.incarnation and known.liveness is not Liveness.LIVE:
        raise Fenced(f"{member.id}: was declared {known.liveness.value}: {known.proof}")
