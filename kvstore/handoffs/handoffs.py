"""All hand-offs that one worker reads: who prefills them, this host's store node, and what ends them.

A hand-off is there while its prefill worker, this host's store node and its own landing are; each of them going ends it
at once, so that nobody waits for a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from moonpool.core.config import TimingConfig
from moonpool.core.errors import Failure, PeerSilent, Reason
from moonpool.core.handoff import PrefillJob
from moonpool.core.ids import RequestId, Role
from moonpool.core.landing import Landed
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, Peers
from moonpool.core.page_view import PageView
from moonpool.core.placement import WorkerRef
from moonpool.kvstore.client import LandingFailure
from moonpool.kvstore.handoffs.copier import Copier
from moonpool.kvstore.handoffs.handoff import Handoff, Owner, end_landing
from moonpool.kvstore.link import StoreLink
from moonpool.wire.channels import MAX_MESSAGE_BYTES, dial


class Handoffs:
    """Event-loop only. ``link`` is the worker's session with its host's store node."""

    def __init__(self, member: Member, layout: KVLayout, view: PageView, peers: Peers, timing: TimingConfig) -> None:
        """``view``: of the pages that take what lands."""
        self._member, self._layers, self._peers = member, layout.layers, peers
        self.link = StoreLink(
            member,
            layout,
            peers,
            timing,
            on_landed=self._landed,
            on_failed=self._landing_failed,
            on_lost=self._store_lost,
        )
        self._copier = Copier(view)
        self._store_name = ""  # of this host's store node, once heard of
        self._handoffs: dict[tuple[RequestId, int], Handoff] = {}  # until they joined or were released
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._handoffs)

    async def start(self) -> None:
        self._unsubscribe = self._peers.subscribe(self._peer_changed)
        await self.link.start()

    async def close(self) -> None:
        """Every hand-off has been ended before."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._copier.close)
        await self.link.close()
        for channel in self._channels.values():
            await channel.close()

    def begin(
        self, job: PrefillJob, prefill: WorkerRef, pages: Sequence[int], owner: Owner, *, blocks: int | None = None
    ) -> Handoff:
        """Ask ``prefill`` to run ``job``; its blocks from ``have_blocks`` on come into ``pages``, one for each block.

        Where there are no pages yet ``blocks`` says how many blocks the prompt has: what lands stays in this host's pool until
        ``take_pages``.

        ``owner`` may hear of its failure before this returns. PeerSilent: no store node of this host is there to land at.
        """
        client = self.link.client
        if client is None:
            raise PeerSilent(
                f"{self._member.id} has no session with the store node of {self._member.node}", peer=self._member.id
            )
        handoff = Handoff(job, prefill, pages, self._layers, client, self._copier, owner, blocks=blocks)
        self._handoffs[handoff.name] = handoff
        if (silent := self._silence(handoff)) is not None:
            handoff.fail(silent)
        else:
            self._spawn(handoff.run(self._channel(prefill.address)))
        return handoff

    def take_pages(self, name: tuple[RequestId, int], pages: Sequence[int]) -> None:
        """Of a hand-off that began without; a no-op once it is over."""
        if name in self._handoffs:
            self._handoffs[name].take_pages(pages)

    def cancel(self, name: tuple[RequestId, int]) -> None:
        """Nobody wants it any more; a no-op once it is over."""
        if name in self._handoffs:
            self._handoffs[name].cancel()

    def over(self, name: tuple[RequestId, int]) -> Handoff | None:
        """Joined or released: notices about it are of no interest any more."""
        return self._handoffs.pop(name, None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0)]
            self._channels[address] = dial(address, options=options)
        return self._channels[address]

    def _landed(self, landed: Landed) -> None:
        handoff = self._handoffs.get((landed.request, landed.attempt))
        if handoff is not None:
            handoff.landed(landed)

    def _landing_failed(self, failure: LandingFailure) -> None:
        handoff = self._handoffs.get((failure.request, failure.attempt))
        if handoff is not None:
            handoff.landing_through(failure.landing, failure.error)
        elif self.link.client is not None:  # of an attempt that ended before it heard of its landing
            self._spawn(end_landing(self.link.client, failure.landing))

    def _store_lost(self) -> None:
        """Named, so that the next attempts land elsewhere until it is back."""
        words = f"the store node of {self._member.node} is gone, and its landings with it"
        lost = Failure(Reason.PEER_SILENT, words, self._store_name)
        for handoff in list(self._handoffs.values()):
            handoff.fail(lost)

    def _peer_changed(self, change: MemberChange) -> None:
        if change.member.role is Role.STORE and change.member.node == self._member.node:
            self._store_name = change.member.id
        if change.member.role in (Role.PREFILL, Role.BOTH):
            for handoff in list(self._handoffs.values()):
                if (silent := self._silence(handoff)) is not None:
                    handoff.fail(silent)
            self._close_channels()

    def _close_channels(self) -> None:
        """To addresses where no prefill worker is any more: a restarted one has another."""
        used = {handoff.prefill.address for handoff in self._handoffs.values()}
        live = {member.address for role in (Role.PREFILL, Role.BOTH) for member in self._peers.live(role)}
        for address in self._channels.keys() - used - live:
            self._spawn(self._channels.pop(address).close())

    def _silence(self, handoff: Handoff) -> Failure | None:
        """Why the prefill worker of ``handoff`` will not finish it, where that is known."""
        prefill = handoff.prefill
        change = self._peers.get(prefill.id)
        if change is None or change.member.incarnation < prefill.incarnation:
            return None  # not heard of yet
        if change.member.incarnation > prefill.incarnation:
            return Failure(Reason.PEER_SILENT, f"{prefill.id} was restarted", prefill.id)
        if change.liveness is not Liveness.LIVE:
            return Failure(Reason.PEER_SILENT, f"{prefill.id} is {change.liveness}: {change.proof}", prefill.id)
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
