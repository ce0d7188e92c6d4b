"""How the KV of an admitted sequence comes into its pages: hand-off, prefix load, or local compute.

A hand-off that fails ends its attempt at once (``kvstore.handoffs``), so that the gateway starts the next one instead of
waiting for a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Protocol, TypeVar

from structlog.contextvars import bound_contextvars

from moonpool.core.config import Config
from moonpool.core.errors import Busy, Failure
from moonpool.core.handoff import FirstToken, PrefillJob
from moonpool.core.lifetime import Instant
from moonpool.core.membership import Member, Peers
from moonpool.core.request import PromptLogprobs
from moonpool.decode_worker.batcher import Admission
from moonpool.decode_worker.live import Live
from moonpool.decode_worker.sequence import Sequence
from moonpool.engine.engine import Engine
from moonpool.kvstore.handoffs.handoffs import Handoffs

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
        self._handoffs = Handoffs(member, engine.layout, engine.view, peers, config.timing)
        self.link = self._handoffs.link
        self.prefix: PrefixSource | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        await self._handoffs.start()

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._handoffs.close()

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
        if self.link.client is None:
            busy = Busy(f"{self._member.id} has no session with the store node of {self._member.node}", peer=self._member.id)
            self._owner.fill_failed(live, Failure.of(busy))
            self._owner.released(live)
            return
        placement, here = live.placement, self._member.node
        job = PrefillJob(live.attempt, placement.segments, placement.decode, here, matched, placement.helpers)
        live.stop = partial(self._handoffs.cancel, live.sequence.name)
        self._handoffs.begin(job, placement.prefill, live.sequence.pages, _Owner(live, self))

    def over(self, live: Live) -> None:
        """Joined or released: notices about it are of no interest any more."""
        handoff = self._handoffs.over(live.sequence.name)
        live.stop = None
        if handoff is not None and handoff.last_landed:
            live.life.stamp(Instant.LAST_LAYER_LANDED, handoff.last_landed)

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

    def copied(self, layer: int, blocks: SequenceOf[int]) -> None: ...
