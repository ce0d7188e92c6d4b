"""How the KV of an admitted sequence comes into its pages: hand-off, prefix load, or local compute.

A hand-off is there while its prefill worker, this host's store node and its own landing are; each of them going ends it
at once, so that the gateway starts the next attempt instead of waiting for a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from structlog.contextvars import bound_contextvars

from moonpool.core.config import Config
from moonpool.core.errors import Busy, Failure, Reason
from moonpool.core.handoff import FirstToken, PrefillJob
from moonpool.core.ids import RequestId, Role
from moonpool.core.landing import Landed
from moonpool.core.lifetime import Instant
from moonpool.core.membership import Liveness, Member, MemberChange, Peers
from moonpool.core.request import PromptLogprobs
from moonpool.decode_worker.batcher import Admission
from moonpool.decode_worker.copier import Copier
from moonpool.decode_worker.handoff import Handoff, end_landing
from moonpool.decode_worker.live import Live
from moonpool.decode_worker.sequence import Sequence
from moonpool.engine.engine import Engine
from moonpool.kvstore.client import LandingFailure
from moonpool.kvstore.link import StoreLink
from moonpool.wire.channels import MAX_MESSAGE_BYTES, dial

T = TypeVar("T")
log = logging.getLogger(__name__)


class PrefixSource(Protocol):
    """Where whole blocks of a prompt that is computed here may come from, beside the device pages."""

    async def load(self, live: Live, matched: int) -> int:
        """Bring blocks after the ``matched`` leading ones into the sequence's pages; returns how many lead now.

        Cancelled when the attempt ends: on return nobody writes the pages any more.
        """


class FillOwner(Protocol):
    """The worker, as far as filling goes. Every fill ends with one of ``joined`` and ``released``."""

    def first_token_ends(self, live: Live, first: FirstToken) -> bool: ...

    def prompt_logprobs(self, live: Live, part: PromptLogprobs) -> None: ...

    def emit_first(self, live: Live, first: FirstToken, *, ends: bool) -> None: ...

    def joined(self, live: Live, computed: int) -> None: ...

    def fill_failed(self, live: Live, failure: Failure) -> None: ...

    def released(self, live: Live) -> None: ...


class Filler:
    def __init__(self, config: Config, engine: Engine, member: Member, peers: Peers, owner: FillOwner) -> None:
        self._engine, self._member, self._owner = engine, member, owner
        self._reuse = config.engine.reuse
        self._peers = peers
        self.link = StoreLink(
            member,
            engine.layout,
            peers,
            config.timing,
            on_landed=self._landed,
            on_failed=self._landing_failed,
            on_lost=self._store_lost,
        )
        self.prefix: PrefixSource | None = None
        self._copier = Copier(engine.kv_bytes)
        self._store_name = ""  # of this host's store node, once heard of
        self._handoffs: dict[tuple[RequestId, int], Handoff] = {}  # until they joined or were released
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._unsubscribe = self._peers.subscribe(self._peer_changed)
        await self.link.start()

    @property
    def handoffs(self) -> int:
        return len(self._handoffs)

    def fill(self, live: Live, admission: Admission) -> None:
        with bound_contextvars(request=live.request, attempt=live.attempt.number):  # of the tasks that are begun here
            self._fill(live, admission)

    def _fill(self, live: Live, admission: Admission) -> None:
        sequence = live.sequence
        if sequence.remote:
            self._hand_off(live, admission.matched)
        elif self._loads(sequence):
            begun = time.monotonic()
            assert self.prefix is not None
            task = self._spawn(self.prefix.load(live, admission.matched))
            live.stop = partial(_cancel, task)
            task.add_done_callback(lambda load: self._loaded(live, admission.matched, begun, load))
        else:
            self._owner.joined(live, sequence.computed)

    def _loads(self, sequence: Sequence) -> bool:
        """Whether the pool may have more of its prompt: one of which every token has to be computed has no use for it."""
        if self.prefix is None or not self._reuse or self.link.client is None or sequence.left <= 1:
            return False
        return sequence.reusable(self._engine.layout.block_tokens) == len(sequence.keys)

    async def close(self) -> None:
        """Every attempt has been ended before."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._copier.close)
        await self.link.close()
        for channel in self._channels.values():
            await channel.close()

    # -- local prompts -----------------------------------------------------------------------------------------------

    def _loaded(self, live: Live, matched: int, begun: float, load: asyncio.Task[int]) -> None:
        live.stop = None
        if load.cancelled() or not live.wanted:
            self._owner.released(live)
            return
        blocks = matched
        if (error := load.exception()) is not None:  # what the pool cannot give is computed
            log.error("prefix of %s not loaded", live.request, exc_info=error)
        else:
            blocks = load.result()
        size = self._engine.layout.block_tokens
        live.load_seconds += time.monotonic() - begun
        live.loaded_tokens = (blocks - matched) * size
        self._owner.joined(live, min(blocks * size, len(live.sequence.tokens) - 1))

    # -- hand-offs ---------------------------------------------------------------------------------------------------

    def _hand_off(self, live: Live, matched: int) -> None:
        client = self.link.client
        if client is None:
            busy = Busy(f"{self._member.id} has no session with the store node of {self._member.node}", peer=self._member.id)
            self._owner.fill_failed(live, Failure.of(busy))
            self._owner.released(live)
            return
        placement = live.placement
        here = self._member.node
        job = PrefillJob(live.attempt, placement.segments, placement.decode, here, matched, placement.helpers)
        handoff = Handoff(
            job, placement.prefill, live.sequence, self._engine.layout.layers, client, self._copier, _Owner(live, self)
        )
        self._handoffs[live.sequence.name] = handoff
        live.stop = handoff.cancel
        if (silent := self._silence(handoff)) is not None:
            handoff.fail(silent)
            return
        self._spawn(handoff.run(self._channel(placement.prefill.address)))

    def over(self, live: Live) -> None:
        """Joined or released: notices about it are of no interest any more."""
        handoff = self._handoffs.pop(live.sequence.name, None)
        live.stop = None
        if handoff is not None and handoff.last_landed:
            live.life.stamp(Instant.LAST_LAYER_LANDED, handoff.last_landed)

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

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


class _Owner:
    """What a hand-off asks for, on behalf of its attempt."""

    def __init__(self, live: Live, filler: Filler) -> None:
        self._live, self._filler = live, filler
        self._owner = filler._owner

    def first_token_ends(self, first: FirstToken) -> bool:
        return self._owner.first_token_ends(self._live, first)

    def prompt_logprobs(self, part: PromptLogprobs) -> None:
        self._owner.prompt_logprobs(self._live, part)

    def emit_first(self, first: FirstToken, *, ends: bool) -> None:
        self._owner.emit_first(self._live, first, ends=ends)

    def join(self) -> None:
        self._filler.over(self._live)
        self._owner.joined(self._live, len(self._live.attempt.context))

    def fail(self, failure: Failure) -> None:
        self._owner.fill_failed(self._live, failure)

    def release(self) -> None:
        self._filler.over(self._live)
        self._owner.released(self._live)
