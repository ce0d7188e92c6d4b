"""The decode worker: takes attempts from gateways, has their prompts filled in, batches them and streams their ids.

Everything but the compute thread and the copy thread runs on the event loop, so attempts, batcher and pages need no
lock. One exit for every attempt: ``_retire`` says the last word to its gateway; its pages go once nobody writes or
reads them any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Self

import grpc
import structlog

from moonpool.core.blocks import BlockHasher, load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import Busy, Cancelled, DeadlinePassed, Failure, MoonpoolError, Moved, PeerSilent
from moonpool.core.handoff import FirstToken
from moonpool.core.ids import RequestId, Role
from moonpool.core.lifetime import Instant, Lives
from moonpool.core.membership import LiveAttempt, Liveness, Member, MemberChange, Peers, PrefillTiming, WorkerReport
from moonpool.core.placement import Placement
from moonpool.core.progress import Progress
from moonpool.core.request import Attempt, Emission, FinishReason, PromptLogprobs, Sampled
from moonpool.decode_worker.admission import check_attempt, token_limit
from moonpool.decode_worker.batcher import Admission
from moonpool.decode_worker.emitting import Emitter
from moonpool.decode_worker.filling import Filler
from moonpool.decode_worker.leaving import leave
from moonpool.decode_worker.live import Attempts, Live
from moonpool.decode_worker.publisher import BlockStore
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.decode_worker.service import DecodeFace
from moonpool.decode_worker.steps import MAX_TIMINGS, StepLoop
from moonpool.decode_worker.stream import TokenStream
from moonpool.engine.engine import Engine
from moonpool.engine.journal import PageJournal
from moonpool.engine.permit import step_turns

TOLD_LIVES = 32  # in ``words``
SOURCES = ("device", "pool", "remote", "computed")  # of a prompt's KV, where the prompt is computed here
ENDINGS = ("started", "refused", "cancelled", "failed", "moved")
COUNTED = (*ENDINGS, "tokens", "messages", *(f"prefix_tokens_{one}" for one in SOURCES))
log = logging.getLogger(__name__)
_told = structlog.get_logger(__name__)


class DecodeWorker:
    """Service object of a decode worker, and the base of role ``both``."""

    def __init__(self, config: Config, engine: Engine, member: Member, peers: Peers, hash_key: bytes) -> None:
        self._engine, self._member, self._peers, self._hash_key = engine, member, peers, hash_key
        self._attempts = Attempts()
        self._streams: set[TokenStream] = set()
        self._journal = PageJournal(engine.pages, member.id, member.incarnation)
        self._filler = Filler(config, engine, member, peers, self)
        self._tells_ends = config.store.eviction == "hazard"  # the one policy that learns from them
        self._steps = StepLoop(config, engine, self, self._store, step_turns(config, member.id))
        self._budget_ms = config.timing.request_budget_ms
        self._broken: Failure | None = None
        self._leaving = False
        self._prefills: deque[PrefillTiming] = deque(maxlen=MAX_TIMINGS)
        self._counts: Counter[str] = Counter()
        self._emitter = Emitter(engine, self._counts)
        self.lifetimes = Lives()
        self._unsubscribe: Callable[[], None] = lambda: None

    @classmethod
    async def start(cls, config: Config, engine: Engine, member: Member, peers: Peers) -> Self:
        """Ready to serve. ConfigError where the hash key cannot be read, LayoutMismatch where this host's pool differs."""
        worker = cls(config, engine, member, peers, load_hash_key(config.key_file(Path.home())))
        worker._unsubscribe = peers.subscribe(worker._peer_changed)
        await worker._filler.start()
        return worker

    def add_to(self, server: grpc.aio.Server) -> None:
        DecodeFace(self).add_to(server)

    # -- what gateways ask -------------------------------------------------------------------------------------------

    def open_stream(self) -> TokenStream:
        stream = TokenStream(self._counts)
        self._streams.add(stream)
        return stream

    def close_stream(self, stream: TokenStream) -> None:
        """The gateway is gone, or too slow: nobody wants its answers any more."""
        stream.close()
        self._streams.discard(stream)
        for live in self._attempts.all():
            if live.stream is stream:
                self._cancelled(live, None)

    def begin(self, stream: TokenStream, attempt: Attempt, placement: Placement) -> None:
        """Take ``attempt`` and its siblings; a refusal is the first and last emission of each. A newer attempt ends the older
        one of its request."""
        siblings = {sibling: attempt.of(sibling) for sibling in attempt.siblings}
        if not self._newest(stream, attempt):
            for one in siblings.values():
                self._refuse(stream, one, Cancelled(f"attempt {attempt.number} of {attempt.request.id}, their first, is over"))
            return
        siblings = {sibling: one for sibling, one in siblings.items() if self._newest(stream, one)}
        attempt = replace(attempt, siblings=tuple(siblings))
        try:
            self._admit(stream, attempt, placement, list(siblings.values()))
        except MoonpoolError as e:
            for one in (attempt, *siblings.values()):
                self._refuse(stream, one, e)

    def _newest(self, stream: TokenStream, attempt: Attempt) -> bool:
        """Whether it is to be taken; then an older one is ended."""
        request = attempt.request.id
        newest, older = self._attempts.supersede(request, attempt.number)
        if not newest and self._attempts.get(request, attempt.number) is None:
            self._refuse(stream, attempt, Cancelled(f"attempt {attempt.number} of {request} is over or replaced"))
        if older is not None:
            self._abort(older, None)
        return newest

    def cancel(self, stream: TokenStream, request: RequestId, attempt: int) -> None:
        """End it without an answer; unknown or finished attempts are a no-op."""
        live = self._attempts.get(request, attempt)
        if live is not None and live.stream is stream:
            self._cancelled(live, Emission(request, attempt, live.position, finish=FinishReason.CANCELLED))

    def _admit(self, stream: TokenStream, attempt: Attempt, placement: Placement, siblings: list[Attempt]) -> None:
        if self._broken is not None:
            raise Busy(f"{self._member.id} has stopped computing: {self._broken.message}", peer=self._member.id)
        if self._leaving:
            raise self._moved()
        check_attempt(attempt, self._engine)
        hasher = BlockHasher(self._hash_key, attempt.request.namespace, self._engine.layout.block_tokens)
        remote = placement.prefill.id != self._member.id
        sequences = [Sequence(one, hasher, token_limit(self._engine), remote) for one in (attempt, *siblings)]
        sequences[0].due = time.monotonic() + attempt.first_id_within_s(self._budget_ms)
        for sequence in sequences[1:]:
            sequence.phase, sequence.scores = Phase.FOLLOWING, None
        try:
            self._steps.add(sequences[0], sequences[1:])
        except Busy as e:
            raise Busy(f"{self._member.id}: {e.message}", peer=self._member.id) from e
        guide = attempt.request.sampling.guide
        if guide is not None and not self._engine.guides.knows(guide):  # compiled by the time that its first id is drawn
            asyncio.get_running_loop().run_in_executor(None, self._engine.guides.warm, guide)
        members = [Live(sequence.attempt, placement, stream, sequence) for sequence in sequences]
        for live in members:
            live.life.stamp(Instant.ADMITTED, time.monotonic())
            live.deadline = asyncio.get_running_loop().call_later(attempt.deadline_ms / 1000, self._deadline, live)
            self._attempts.add(live)
            self._counts["started"] += 1
        if siblings:
            self._attempts.join(members)

    def _refuse(self, stream: TokenStream, attempt: Attempt, error: MoonpoolError) -> None:
        self._counts["refused"] += 1
        _told.info("attempt refused", request=attempt.request.id, attempt=attempt.number, reason=error.reason.value)
        stream.put(Emission(attempt.request.id, attempt.number, len(attempt.emitted), error=Failure.of(error)))

    # -- what the step loop tells ------------------------------------------------------------------------------------

    def fill(self, admission: Admission) -> None:
        live = self._attempts.lead(*admission.sequence.name)
        assert live is not None  # an attempt that ended is in no queue
        live.life.stamp(Instant.QUEUED if live.sequence.remote else Instant.PREFILL_BEGUN, time.monotonic())
        if admission.copy is not None:
            self._engine.copy_page(*admission.copy)
            self._steps.batcher.copied(admission)
        self._filler.fill(live, admission)

    def sampled(self, sequence: Sequence, ids: tuple[Sampled, ...]) -> None:
        live = self._attempts.lead(*sequence.name)
        if live is None:
            return
        first = live.emitted == 0 and not sequence.remote
        if first and sequence.scores is not None:
            live.prompt_logprobs += sequence.scores.parts()
        ended = self._emitter.all(live, ids)
        if first and not live.over:
            self._note_prefill(live)
        if not live.family:
            for member in ended:
                self._abort(member, None)
            return
        for member in ended:
            self._retire(member, None)
        self._fork(live)

    def _fork(self, lead: Live) -> None:
        """The prompt is in pages, and every choice has its first id: from now on each is by itself. Nothing without family."""
        siblings = self._attempts.part(lead)[1:]
        if not siblings:
            return
        self._steps.fork(lead.sequence, [one.sequence for one in siblings if not one.over])
        if lead.over:
            self._steps.end(lead.sequence)

    def failed(self, sequence: Sequence, failure: Failure) -> None:
        live = self._attempts.lead(*sequence.name)
        for member in live.members if live is not None else ():
            self._fail(member, failure)

    def broke(self, failure: Failure) -> None:
        self._broken = failure
        for live in self._attempts.all():
            self._fail(live, failure)

    def measured(self, timing: PrefillTiming) -> None:
        """A prompt was computed here: for whoever has a use for it."""

    def _note_prefill(self, live: Live) -> None:
        """A prompt computed here has its first token."""
        seconds = live.life.between(Instant.PREFILL_BEGUN, Instant.FIRST_TOKEN) or 0.0
        loaded = live.load_seconds, live.loaded_tokens, live.fetch_seconds
        timing = PrefillTiming(len(live.attempt.context), live.cached_tokens, seconds, *loaded)
        self._prefills.append(timing)
        self.measured(timing)
        cached, from_pool = live.cached_tokens, min(live.loaded_tokens, live.cached_tokens)
        remote = min(live.fetched_tokens, from_pool)
        tokens = (cached - from_pool, from_pool - remote, remote, timing.prompt_tokens - cached)
        self._counts.update({f"prefix_tokens_{one}": n for one, n in zip(SOURCES, tokens, strict=True)})

    # -- what filling tells ------------------------------------------------------------------------------------------

    def first_token_ends(self, live: Live, first: FirstToken) -> bool:
        """Whether nobody goes on after it. PeerSilent where it does not have an id for each."""
        if first.sampled is not None and len(first.ids) != len(live.members):
            prefill = live.placement.prefill.id
            raise PeerSilent(f"{prefill} drew {len(first.ids)} first ids for {len(live.members)} choices", peer=prefill)
        told = zip(live.members, first.ids, strict=False)
        return first.ends_request or all(
            m.over or self._emitter.finish(m, one.token, m.position) is not None for m, one in told
        )

    def prompt_logprobs(self, live: Live, part: PromptLogprobs) -> None:
        live.prompt_logprobs.append(part)

    def emit_first(self, live: Live, first: FirstToken, *, ends: bool) -> None:
        """The prefill worker's ids, streamed before the last bytes land."""
        live.cached_tokens = first.cached_tokens
        live.sequence.tokens += [one.token for one in first.ids[:1]]
        ended = self._emitter.all(live, first.ids)
        for member in live.members if ends else ended:
            self._retire(member, None)

    def joined(self, live: Live, computed: int) -> None:
        if live.emitted == 0:
            live.cached_tokens = min(computed, len(live.attempt.request.prompt))
        live.life.stamp(Instant.RUNNABLE, time.monotonic())
        self._steps.join(live.sequence, computed)
        if live.sequence.remote:
            self._fork(live)

    def fill_failed(self, live: Live, failure: Failure) -> None:
        for member in live.members:
            if not member.over:
                self._counts["failed"] += 1
                self._retire(member, self._last(member, failure))

    def released(self, live: Live) -> None:
        self._attempts.part(live)
        self._steps.end(live.sequence)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _cancelled(self, live: Live, last: Emission | None) -> None:
        self._counts["cancelled"] += 1
        live.life.stamp(Instant.CANCELLED, time.monotonic())
        self._abort(live, last)

    def _deadline(self, live: Live) -> None:
        live.life.stamp(Instant.CANCELLED, time.monotonic())
        error = DeadlinePassed(f"{live.attempt.deadline_ms} ms were left of the request's budget when it came here")
        self._fail(live, Failure.of(error))

    def _fail(self, live: Live, failure: Failure) -> None:
        self._counts["failed"] += 1
        self._abort(live, self._last(live, failure))

    def _last(self, live: Live, failure: Failure) -> Emission:
        return Emission(live.request, live.attempt.number, live.position, error=failure)

    def _abort(self, live: Live, last: Emission | None) -> None:
        """Whatever phase it is in: while KV comes in from elsewhere, whoever brings it lets go of the pages.

        A prompt that others of its family want is still computed.
        """
        if not self._retire(live, last) or live.wanted:
            return
        lead = live.members[0]
        if lead.stop is not None:
            lead.stop()
        else:
            self._attempts.part(lead)
            self._steps.end(lead.sequence)

    def _retire(self, live: Live, last: Emission | None) -> bool:
        if not self._attempts.remove(live):
            return False
        live.over = True
        if live.deadline is not None:
            live.deadline.cancel()
        live.life.stamp(Instant.FINISHED, time.monotonic())
        live.life.facts |= live.facts(last)
        self.lifetimes.add(live.request, live.attempt.number, live.life)
        if last is not None:
            live.stream.put(last)
        client = self._filler.link.client
        if client is not None and self._tells_ends:
            client.ended(live.attempt.request.use, live.position)
        return True

    def _peer_changed(self, change: MemberChange) -> None:
        if change.member.role is Role.CONDUCTOR and change.liveness is Liveness.LIVE:
            self._journal.resync()

    def _store(self) -> BlockStore | None:
        return self._filler.link.client

    # -- leaving -----------------------------------------------------------------------------------------------------

    async def drain(self, limit_s: float) -> None:
        """Admit nothing more; finish what can be finished within ``limit_s`` seconds, hand the rest over."""
        self._leaving = True
        await leave(self, limit_s)

    def held(self) -> list[Live]:
        return self._attempts.all()

    def publishing(self) -> int:
        return len(self._steps.publisher)

    def others(self) -> bool:
        decoding = (m for role in (Role.DECODE, Role.BOTH) for m in self._peers.live(role))
        return any(m.ready and m.id != self._member.id for m in decoding)

    def give_back(self, live: Live) -> None:
        """With its family, which goes on together elsewhere."""
        for member in live.members:
            if not member.over:
                self._counts["moved"] += 1
                self._abort(member, self._last(member, Failure.of(self._moved())))

    def _moved(self) -> Moved:
        return Moved(f"{self._member.id} is leaving", peer=self._member.id)

    # -- Service -----------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        pages, batcher, publisher = self._engine.pages, self._steps.batcher, self._steps.publisher
        return {
            "pages_total": pages.total,
            "pages_used": pages.used,
            "pages_free": pages.free,
            "pages_cached": pages.cached,
            "pages_publishing": len(publisher),
            "requests_live": len(self._attempts),
            "requests_running": batcher.running,
            "requests_filling": batcher.holding - batcher.running,
            "requests_waiting": batcher.waiting,
            "handoffs": self._filler.handoffs,
            "streams": len(self._streams),
            "store_connected": float(self._store() is not None),
            "threads": threading.active_count(),
            "steps_count": self._steps.steps,
            "preemptions_count": batcher.preemptions,
            "blocks_published_count": publisher.stored,
            "blocks_mended_count": publisher.mended,
            "blocks_behind_most": publisher.most_behind,
            "blocks_not_published_count": publisher.given_up,
            **self._steps.turns.numbers(),
            **{f"{name}_count": self._counts[name] for name in COUNTED},
        }

    def progress(self, now: float) -> list[Progress]:
        """A step loop that has ended does nothing ever again."""
        computing = self._steps.watch.at(now)
        return [computing if self._broken is None else replace(computing, still_s=inf)]

    def words(self) -> dict[str, str]:
        return {
            "model": self._member.model,
            "layout": self._engine.layout.fingerprint,
            "state": self._broken.message if self._broken else "computing",
            "lives": self.lifetimes.to_json(TOLD_LIVES),
        }

    def report(self) -> WorkerReport:
        prefills, steps = tuple(self._prefills), tuple(self._steps.timings)
        self._prefills.clear()
        self._steps.timings.clear()
        pages = self._engine.pages
        return WorkerReport(
            self._member.id,
            self._member.incarnation,
            tuple(self._describe(live) for live in self._attempts.all()),
            pages.free + pages.cached,
            pages.total,
            prefills,
            steps,
            self._journal.frames(),
        )

    def _describe(self, live: Live) -> LiveAttempt:
        sequence, request = live.sequence, live.attempt.request
        following = sequence.phase is Phase.FOLLOWING
        left = 0 if sequence.remote or following or sequence.left == 1 else sequence.left
        return LiveAttempt(live.request, live.attempt.number, len(request.prompt), live.possible, left, live.position)

    async def clear_device_pages(self) -> int:
        """Forget cached pages that nobody uses; returns how many."""
        return self._engine.pages.clear_cached()

    async def close(self) -> None:
        self._unsubscribe()
        for stream in list(self._streams):
            self.close_stream(stream)
        await self._steps.close()
        await self._filler.close()
