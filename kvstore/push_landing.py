"""One landing as its writer fills it: layers out as they finish, broken connections mended, drained at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.errors import AttemptFailed, Bug, Failure, MoonpoolError, TransferFailed
from moonpool.core.handoff import Drained
from moonpool.core.landing import Landing, SlotRef
from moonpool.core.layout import KVLayout
from moonpool.kvstore.push_sources import Source, SourceReader, frame_of, pieces_of
from moonpool.kvstore.push_target import LandingState, PushTarget
from moonpool.kvstore.transfer.carrier import LENGTH, Endpoint

SETTLE_S = 0.5  # after the last push is done: how long notices may still be on their way before slices are pushed again
RESETTLE_S = 5.0  # the same after pushing again; then the landing has failed
STATE_WAIT_S = 0.2  # of one question for the state
MENDS = 3  # broken connections that one landing survives
log = structlog.get_logger(__name__)

Slice = tuple[int, int]  # prompt block, layer


@dataclass(slots=True, eq=False)
class _Push:
    chunk: int
    layer: int
    sources: tuple[Source, ...]
    endpoint: Endpoint
    size: int
    future: Future[None]


class PushLanding:
    """Made by ``Pusher``. ``push_layer`` and ``push_slots`` may be called from any one thread, the rest from the loop.

    The caller holds the source bytes, unchanged, until ``drain`` or ``cancel`` has returned. ``failure`` is the first
    one that could not be mended: nothing is posted after it, and the attempt is over.
    """

    def __init__(
        self,
        landing: Landing,
        layout: KVLayout,
        memories: Sequence[NDArray[np.uint8]],
        target: PushTarget,
        endpoint: Endpoint,
    ) -> None:
        self.landing = landing
        self.failure: Failure | None = None
        self._layout = layout
        self._reader = SourceReader(layout, memories)
        self._target = target
        self._endpoint = endpoint
        self._slots = {slot.block: slot for slot in landing.slots}
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # _pushes, _endpoint, _closed
        self._pushes: list[_Push] = []
        self._closed = False
        self._gave_up = False
        self._mends = 0
        self._mending: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[Drained] | None = None
        self._sent = 0
        self._unsafe = 0  # the last generation of the endpoint in which a posted write did not end well; 0: none
        target.landings += 1

    # Pushing, from the compute thread.

    def push_layer(self, chunk: int, layer: int, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Push ``layer`` of (prompt block, page, valid tokens); blocks that the landing does not list are skipped.

        Digests the pages and queues the write: about 0.1 ms for eight blocks. A no-op once the landing failed or ends.
        Bug: the token count differs from what was granted.
        """
        sources = []
        for block, page, valid in blocks:
            slot = self._slots.get(block)
            if slot is not None:
                if valid != slot.valid:
                    raise Bug(f"landing {self.landing.id}: block {block} has {valid} tokens, {slot.valid} were granted")
                sources.append(self._reader.of_page(page, layer, slot))
        self._push(chunk, layer, tuple(sources))

    def push_slots(self, chunk: int, layer: int, slots: Sequence[tuple[int, SlotRef]]) -> None:
        """Push ``layer`` of (prompt block, sealed slot in the regions registered as source), with the slot's own digests."""
        sources = []
        for block, ref in slots:
            slot = self._slots.get(block)
            if slot is not None:
                sources.append(self._reader.of_sealed(ref, layer, slot))
        self._push(chunk, layer, tuple(sources))

    def _push(self, chunk: int, layer: int, sources: tuple[Source, ...]) -> None:
        with self._lock:
            if sources and not self._closed and self.failure is None:
                self._send(chunk, layer, sources)

    def _send(self, chunk: int, layer: int, sources: tuple[Source, ...]) -> None:
        """Under the lock, so that a connection that is mended meanwhile finds the push in the list."""
        frame = frame_of(self.landing, chunk, layer, sources)
        pieces = pieces_of(self._layout, layer, sources)
        future = self._target.sender_for(self._endpoint).push(self._endpoint, pieces, frame)
        push = _Push(chunk, layer, sources, self._endpoint, int(pieces[:, LENGTH].sum()) + len(frame), future)
        self._pushes.append(push)
        future.add_done_callback(lambda future: self._ended(push))

    async def posted(self) -> None:
        """Until nothing that was pushed so far reads the source any more. Slices that are rejected later are read again."""
        await self._all_ended()

    # Ends of pushes, first on the carrier's thread, then on the loop.

    def _ended(self, push: _Push) -> None:
        error = None if push.future.cancelled() else push.future.exception()
        if error is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._broken, push, error)
        except RuntimeError:  # the loop is closed: nobody waits for this landing any more
            log.warning("push_failed_late", landing=self.landing.id, error=str(error))

    def _broken(self, push: _Push, error: BaseException) -> None:
        if self.failure is not None or self._gave_up:
            return
        if not isinstance(error, TransferFailed):
            self._fail(error)
        elif self._mending is None:
            self._mending = asyncio.create_task(self._mend(push.endpoint), name=f"mend landing {self.landing.id}")

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = replace(Failure.of(error), peer=self._target.name)
            self._withdraw()

    def _withdraw(self) -> None:
        """Cancel what is not yet posted."""
        with self._lock:
            waiting = [push.future for push in self._pushes]
        for future in waiting:
            future.cancel()

    async def _mend(self, lost: Endpoint) -> None:
        """The connection to ``lost`` broke: go on with the endpoint's next life, and push again what did not land."""
        try:
            self._mends += 1
            if self._mends > MENDS:
                raise TransferFailed(f"the connection to {self._target.name} broke {self._mends} times", peer=self._target.name)
            endpoint = await self._target.endpoint_after(lost)
            await self._pushes_ended(lost)
            state = await self._target.state(self.landing.id, 0.0)
            if not state.known:  # its slots may be another's by now: nothing of it goes to the new endpoint
                raise TransferFailed(f"landing {self.landing.id} is over at {self._target.name}", peer=self._target.name)
            with self._lock:
                self._endpoint = endpoint
            await self._pushes_ended(lost)
            self._push_again(self._outstanding() & state.missing, older_than=endpoint)
            log.info("push_mended", landing=self.landing.id, generation=endpoint.generation)
        except MoonpoolError as e:
            self._fail(e)
        finally:
            self._mending = None

    async def _pushes_ended(self, lost: Endpoint | None = None) -> None:
        """Every push (those to ``lost`` where given) is done, failed or cancelled, and its end was acted upon."""
        with self._lock:
            futures = [push.future for push in self._pushes if lost is None or push.endpoint is lost]
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        await asyncio.sleep(0)  # lets _broken run

    def _outstanding(self) -> set[Slice]:
        with self._lock:
            return {(source.slot.block, push.layer) for push in self._pushes for source in push.sources}

    def _push_again(self, wanted: set[Slice] | frozenset[Slice], *, older_than: Endpoint | None = None) -> None:
        """The ended pushes of ``wanted`` slices once more, to the current endpoint."""
        with self._lock:
            if self._gave_up or self.failure is not None:
                return
            old, self._pushes = self._pushes, []
            for push in old:
                if not push.future.done() or (push.endpoint is older_than and _succeeded(push)):
                    self._pushes.append(push)
                    continue
                self._account(push)
                again = tuple(s for s in push.sources if (s.slot.block, push.layer) in wanted)
                rest = tuple(s for s in push.sources if (s.slot.block, push.layer) not in wanted)
                if rest:
                    self._pushes.append(replace(push, sources=rest, size=0))
                if again:
                    self._send(push.chunk, push.layer, again)

    def _account(self, push: _Push) -> None:
        """``push`` is done: count its bytes once, or note in which life of the endpoint it may have left some behind."""
        if _succeeded(push):
            self._sent += push.size
            push.size = 0
        elif not push.future.cancelled() and isinstance(push.future.exception(), AttemptFailed):
            self._unsafe = max(self._unsafe, push.endpoint.generation)

    # The end.

    async def drain(self) -> Drained:
        """No more layers will come: see that all landed (pushing once more what did not), then say so to the node.

        Returns when nothing reads the source any more. What could not be saved is in ``failure``. May be called again.
        """
        return await self._end()

    async def cancel(self) -> Drained:
        """Post nothing more, poll what is posted to its end, say so. Also while ``drain`` waits."""
        self._gave_up = True
        with self._lock:
            self._closed = True
        self._withdraw()
        return await self._end()

    async def end_for_reader(self) -> None:
        """After ``cancel``: the reader broke off, maybe before it heard of this landing, and will not end it itself."""
        await self._target.end(self.landing.id)

    async def _end(self) -> Drained:
        with self._lock:
            self._closed = True
        if self._ending is None:
            self._ending = asyncio.create_task(self._finish(), name=f"end landing {self.landing.id}")
        return await asyncio.shield(self._ending)

    async def _finish(self) -> Drained:
        try:
            await self._land()
        except MoonpoolError as e:
            self._fail(e)
        await self._all_ended()
        with self._lock:
            for push in self._pushes:
                self._account(push)
        await self._say_drained()
        self._target.landings -= 1
        return Drained(self.landing.id, self._sent, self._endpoint.carrier)

    async def _all_ended(self) -> None:
        await self._pushes_ended()
        while self._mending is not None:
            await asyncio.wait({self._mending})
            await self._pushes_ended()

    async def _land(self) -> None:
        """Until all that was pushed has landed. Slices that were rejected, or of which no notice came, go once more."""
        repeated: set[Slice] = set()
        while True:
            await self._all_ended()
            if self.failure is not None or self._gave_up or not self._pushes:
                return
            missing, rejected = await self._settle(repeated)
            if not missing or self._gave_up:
                return
            again = (rejected or missing) - repeated
            if not again:
                raise TransferFailed(
                    f"{len(missing)} slices of landing {self.landing.id} did not land, pushed twice", peer=self.landing.node
                )
            log.warning("pushed_again", landing=self.landing.id, slices=len(again), rejected=len(rejected))
            self._push_again(again)
            repeated |= again

    async def _settle(self, repeated: set[Slice]) -> tuple[set[Slice], set[Slice]]:
        """(missing, rejected for the first time) once there is one of those, nothing is missing, or it took too long."""
        begun = time.monotonic()
        while True:
            asked = time.monotonic()
            state = await self._target.state(self.landing.id, STATE_WAIT_S)
            missing = self._missing(state)
            rejected = (missing & state.rejected) - repeated
            patience = SETTLE_S if missing - repeated else RESETTLE_S
            now = time.monotonic()
            if not missing or rejected or now - begun >= patience or self._gave_up or self.failure is not None:
                return missing, rejected
            await asyncio.sleep(max(0.0, asked + 0.01 - now))  # the node may have had nothing to wait for

    def _missing(self, state: LandingState) -> set[Slice]:
        """A landing that is over is no longer ours to complete."""
        return self._outstanding() & state.missing if state.known else set()

    async def _say_drained(self) -> None:
        """Not where a write failed in the endpoint's present life: its bytes may still come, so the slots stay fenced."""
        try:
            if self._unsafe:
                state = await self._target.state(self.landing.id, 0.0)
                if state.generation <= self._unsafe:
                    log.warning("not_drained", landing=self.landing.id, generation=state.generation)
                    return
            await self._target.drain(self.landing.id)
        except MoonpoolError as e:
            self._fail(e)


def _succeeded(push: _Push) -> bool:
    return push.future.done() and not push.future.cancelled() and push.future.exception() is None
