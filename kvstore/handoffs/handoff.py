"""One hand-off at its reader: the prefill worker's call, the landing's slices and the copies, around the sink."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import grpc

from moonpool.core.errors import Bug, Failure, MoonpoolError, Reason
from moonpool.core.handoff import Begun, Drained, FirstToken, PrefillJob
from moonpool.core.landing import Landed
from moonpool.core.placement import WorkerRef
from moonpool.core.request import PromptLogprobs
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.handoffs.copier import BadCopy, Copier
from moonpool.kvstore.handoffs.sink import (
    Action,
    CancelPrefill,
    Copy,
    EmitFirst,
    EndLanding,
    Fail,
    HandoffSink,
    Join,
    ReleasePages,
    StopCopies,
)
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import error_of

log = logging.getLogger(__name__)


class Owner(Protocol):
    """What the reader does for a hand-off."""

    def first_token_ends(self, first: FirstToken) -> bool: ...

    def prompt_logprobs(self, part: PromptLogprobs) -> None: ...

    def emit_first(self, first: FirstToken, *, ends: bool) -> None: ...

    def join(self) -> None: ...

    def fail(self, failure: Failure) -> None: ...

    def release(self) -> None: ...

    def copied(self, layer: int, blocks: Sequence[int]) -> None:
        """These slices are in their pages, verified there."""


class Handoff:
    """Event-loop only. Ends by ``join`` or ``release`` of its owner, whatever happens; ``run`` then goes on to ``Drained``."""

    def __init__(
        self,
        job: PrefillJob,
        prefill: WorkerRef,
        pages: Sequence[int],
        layers: int,
        client: WorkerStore,
        copier: Copier,
        owner: Owner,
        *,
        blocks: int | None = None,
    ) -> None:
        """``blocks``: of the prompt, where ``pages`` are only given later, by ``take_pages``; None: one page for each."""
        attempt = job.attempt
        self.prefill = prefill
        self.client = client
        self.drained: Drained | None = None
        self.last_landed = 0.0  # when the last of all its slices was told of
        self._job = job
        self.name = (attempt.request.id, attempt.number)
        self._pages: Sequence[int] | None = pages if blocks is None else None
        self._uncopied: list[Copy] = []  # landed before there were pages
        self._copier = copier
        self._owner = owner
        missing = range(job.have_blocks, len(pages) if blocks is None else blocks)
        self._sink = HandoffSink(attempt.request.id, attempt.number, layers, missing)
        self._stop_copies = threading.Event()
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._cancelled = False
        self._over = False  # ended without joining
        self._untold: int | None = None  # a whole landing that the prefill worker has not told of yet
        self._loose: set[asyncio.Task[None]] = set()

    async def run(self, channel: grpc.aio.Channel) -> None:
        """The prefill worker's call, from the job to its last event."""
        self._call = pb.prefill_rpc.PrefillStub(channel).Run(to_wire(self._job, pb.prefill.PrefillJob()))
        if self._cancelled:
            self._call.cancel()
        try:
            async for message in self._call:
                self._receive(message)
        except grpc.aio.AioRpcError as e:
            self._broken(Failure.of(error_of(e, self.prefill.id)))
        except asyncio.CancelledError:
            if not self._cancelled:  # not by us: the channel or the worker is closing
                self._broken(Failure(Reason.PEER_SILENT, f"the call to {self.prefill.id} was ended", self.prefill.id))
                raise
        except MoonpoolError as e:
            self.fail(Failure.of(e))
            self._call.cancel()
        except Exception as e:
            log.exception("events of %s attempt %d cannot be read", *self.name)
            why = f"{self.prefill.id} sent what cannot be read ({type(e).__name__})"
            self.fail(Failure(Reason.PEER_SILENT, why, self.prefill.id))
            self._call.cancel()
        else:
            self._broken(Failure(Reason.PEER_SILENT, f"{self.prefill.id} ended its call early", self.prefill.id))
        await asyncio.gather(*self._loose)

    def landed(self, landed: Landed) -> None:
        self._tell(lambda: self._sink.landed(landed))

    def fail(self, failure: Failure) -> None:
        """Transfer, peer or deadline: of no interest once everything has been copied."""
        self._tell(lambda: self._sink.failed(failure))

    def landing_through(self, landing: int, failure: Failure | None) -> None:
        """Nothing more of ``landing`` will come: with ``failure`` some of it is missing.

        One that the prefill worker never told of is ended here, nobody else would: one that is whole only when the attempt
        is over, for the word of it may still be on its way.
        """
        told = self._sink.landing is not None and self._sink.landing.id == landing
        if not told and (failure is not None or self._over):
            self._spawn(end_landing(self.client, landing))
        elif not told:
            self._untold = landing
        if failure is not None:
            self.fail(failure)

    def cancel(self) -> None:
        self._tell(self._sink.cancelled)

    def take_pages(self, pages: Sequence[int]) -> None:
        """There are pages now, one for each block: what has landed is copied."""
        self._pages = pages
        uncopied, self._uncopied = self._uncopied, []
        for copy in uncopied:
            self._perform(copy)

    def _receive(self, message: pb.prefill.PrefillEvent) -> None:
        match message.WhichOneof("kind"):
            case "begun":
                begun = from_wire(message.begun, Begun)
                self._tell(lambda: self._sink.begun(begun.landing))
            case "first_token":
                first = from_wire(message.first_token, FirstToken)
                ends = self._over or self._owner.first_token_ends(first)
                self._tell(lambda: self._sink.first_token(first, ends=ends))
            case "prompt_logprobs" if not self._over:
                self._owner.prompt_logprobs(from_wire(message.prompt_logprobs, PromptLogprobs))
            case "drained":
                drained = self.drained = from_wire(message.drained, Drained)
                self._tell(lambda: self._sink.drained(drained))
            case "failed":
                failure = from_wire(message.failed, Failure)
                self.fail(failure)

    def _broken(self, failure: Failure) -> None:
        """The call is over. After ``Drained`` that is its proper end; what is still missing is the store node's to tell."""
        if self.drained is None:
            self.fail(failure)

    def _tell(self, fact: Callable[[], list[Action]]) -> None:
        try:
            actions = fact()
        except Bug as e:  # whatever is ambiguous is cleaned: the attempt ends, its pages go when the copies have ended
            log.exception("hand-off of %s attempt %d", *self.name)
            actions = self._sink.failed(Failure.of(e))
        if not self.last_landed and self._sink.all_landed:
            self.last_landed = time.monotonic()
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case EmitFirst(first, ends):
                self._owner.emit_first(first, ends=ends)
            case Copy():
                self._copy(action)
            case Join():
                self._owner.join()
            case EndLanding(landing):
                self._spawn(end_landing(self.client, landing))
            case StopCopies():
                self._stop_copies.set()
                uncopied, self._uncopied = self._uncopied, []
                for copy in uncopied:
                    self._tell(partial(self._sink.copied, copy.layer, [slot.block for slot in copy.slots]))
            case CancelPrefill():
                self._cancelled = True
                if self._call is not None:
                    self._call.cancel()
            case Fail(failure):
                self._owner.fail(failure)
            case ReleasePages():
                self._over = True
                if self._untold is not None and self._sink.landing is None:
                    self._spawn(end_landing(self.client, self._untold))
                self._owner.release()

    def _copy(self, copy: Copy) -> None:
        if self._pages is None:
            self._uncopied.append(copy)
            return
        layer, slots = copy.layer, copy.slots
        work = [(slot, self._pages[slot.block]) for slot in slots]
        blocks = [slot.block for slot in slots]

        def done(bad: BadCopy | None) -> None:
            if bad is not None:
                self._bad_copy(layer, bad)
            elif not self._stop_copies.is_set():
                self._owner.copied(layer, blocks)
            self._tell(lambda: self._sink.copied(layer, blocks))

        self._copier.copy(self.client, layer, work, self._stop_copies, done)

    def _bad_copy(self, layer: int, bad: BadCopy) -> None:
        if bad.slot is not None:
            self._spawn(self._quarantine(bad.slot.key, layer))
        self.fail(Failure(bad.error.reason, bad.error.message))

    async def _quarantine(self, key: bytes, layer: int) -> None:
        try:
            await self.client.quarantine(key, layer, "landing_copy")
        except MoonpoolError as e:
            log.warning("not quarantined: %s", e)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)


async def end_landing(client: WorkerStore, landing: int) -> None:
    """The reader is through with it."""
    try:
        await client.end_landing(landing)
    except MoonpoolError as e:  # the session is over, and its landings with it
        log.info("landing %d not ended: %s", landing, e)
