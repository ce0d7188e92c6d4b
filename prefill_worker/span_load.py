"""What lies before this worker's span of a long prompt, on its way from the worker that computes it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

from moonpool.core.errors import Failure, Reason
from moonpool.core.handoff import FirstToken
from moonpool.core.ids import MemberId, RequestId
from moonpool.core.request import PromptLogprobs
from moonpool.kvstore.handoffs.handoffs import Handoffs
from moonpool.prefill_worker.prefix import LoadStopped, PrefixLost


class SpanLoad:
    """Blocks ``[first, until)`` of a prompt as they come from the worker before, waited for like a ``PrefixLoad``.

    It is the owner of their hand-off: told on the event loop, waited for on the compute thread. ``failure``: why nothing more
    comes of it; everything from its first block on is then to be computed here.
    """

    bad = None  # a bad copy is put in quarantine by the hand-off itself

    def __init__(
        self, first: int, until: int, layers: int, handoffs: Handoffs, name: tuple[RequestId, int], helper: MemberId
    ) -> None:
        self.first = first
        self.until = until
        self.trusted = until - first
        self.helper = helper
        self.failure: Failure | None = None
        self.cached_tokens = 0  # that the workers before found
        self.asked = time.monotonic()  # or since when it is waited for
        self.came = 0  # slices
        self.first_came = self.last_came = 0.0
        self.slices = layers * self.trusted
        self._missing = [self.trusted] * layers  # blocks of each layer
        self._handoffs = handoffs
        self.name = name
        self._changed = threading.Condition()
        self._stopped = False
        self._over = asyncio.Event()

    # -- compute thread ----------------------------------------------------------------------------------------------

    def needed(self, blocks: int) -> int:
        """Of the first ``blocks`` of the prompt, how many come from here."""
        return max(min(blocks - self.first, self.trusted), 0)

    def has(self, layer: int, blocks: int) -> bool:
        """Whether ``wait`` would return at once."""
        with self._changed:
            return not (self._missing[layer] or self._lost or self._stopped)

    def wait(self, layer: int, blocks: int) -> None:
        """Until ``layer`` of all its blocks is in pages. PrefixLost where it will not come, or LoadStopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._lost or not self._missing[layer])
            if self._stopped:
                raise LoadStopped
            if self._lost:
                raise PrefixLost(self, 0)

    @property
    def _lost(self) -> bool:
        return self.failure is not None and any(self._missing)

    # -- event loop --------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Nothing of it is copied into pages any more."""
        return self._over.is_set()

    async def ended(self) -> None:
        await self._over.wait()

    def stop(self) -> None:
        """Waiters raise LoadStopped, and the worker before is told: await ``ended``."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._handoffs.cancel(self.name)

    def fail(self, failure: Failure) -> None:
        """The first reason stays."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def take_pages(self, pages: Sequence[int]) -> None:
        """One for each block before ``until``: the job is taken up, and waits for it from now on."""
        self.asked = time.monotonic()
        self._handoffs.take_pages(self.name, pages)

    def give_up(self, why: str) -> None:
        """Nothing of it is worth waiting for any more."""
        self.fail(Failure(Reason.PEER_SILENT, why, self.helper))
        self._handoffs.cancel(self.name)

    def copied(self, layer: int, blocks: Sequence[int]) -> None:
        self.last_came = time.monotonic()
        self.first_came = self.first_came or self.last_came
        self.came += len(blocks)
        with self._changed:
            self._missing[layer] -= len(blocks)
            if not self._missing[layer]:
                self._changed.notify_all()

    def emit_first(self, first: FirstToken, *, ends: bool) -> None:
        self.cached_tokens = first.cached_tokens

    def first_token_ends(self, first: FirstToken) -> bool:
        return False

    def prompt_logprobs(self, part: PromptLogprobs) -> None: ...

    def join(self) -> None:
        self.release()

    def release(self) -> None:
        self._handoffs.over(self.name)
        self._over.set()
