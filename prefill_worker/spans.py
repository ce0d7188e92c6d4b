"""One long prompt over several prefill workers: each computes a span of it, and asks the one before for what lies before.

After the chunked pipeline of Mooncake (FAST 2025, section 5.1), with whole weights at every worker: a span is computed in one
pass, and layer l of it begins once layer l of everything before has come, pushed here layer by layer. To its predecessor a
worker is what a decode worker is to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moonpool.core.errors import Failure, InvalidRequest, MoonpoolError
from moonpool.core.handoff import PrefillJob
from moonpool.core.ids import MemberId
from moonpool.core.layout import KVLayout
from moonpool.core.lifetime import Instant
from moonpool.core.membership import Member
from moonpool.core.placement import MOST_IN_GROUP, Helper, WorkerRef
from moonpool.core.request import SamplingParams
from moonpool.kvstore.handoffs.handoffs import Handoffs
from moonpool.prefill_worker.job import Job
from moonpool.prefill_worker.pace import Pace, worth_waiting
from moonpool.prefill_worker.span_load import SpanLoad

LOOK_S = 0.05  # between two looks at how a span comes
log = logging.getLogger(__name__)


class Spans:
    """For all jobs of one worker. Event-loop only."""

    def __init__(self, member: Member, layout: KVLayout, handoffs: Handoffs, pace: Pace, counts: Counter[str]) -> None:
        self._here = WorkerRef(member.id, member.incarnation, member.node, member.address)
        self._size, self._layers = layout.block_tokens, layout.layers
        self._handoffs, self._pace, self._counts = handoffs, pace, counts
        self._watching: set[asyncio.Task[None]] = set()
        self._soon: set[Job] = set()  # that wait here, while those before may compute

    def ask_soon(self, work: Job, have_blocks: int) -> None:
        """Of a job that waits here, and has no pages: who is before it may be free, and need not wait with it.

        All that it holds meanwhile are slots of a landing at this host: whoever finds no room calls ``forgo_all``.
        """
        try:
            work.asked = self._ask(work, have_blocks, None)
        except MoonpoolError as e:
            log.info("the worker before is not asked yet: %s", e)
        if work.asked is not None:
            self._soon.add(work)
            work.on_end.append(lambda: self.forgo(work))

    def forgo(self, work: Job) -> None:
        """What was asked ahead of time is given up, to be asked for again when ``work`` is taken up. No page was written."""
        self._soon.discard(work)
        load, work.asked = work.asked, None
        if load is not None:
            load.give_up("what it would send has to wait")

    def forgo_all(self) -> None:
        """No job may keep slots while it waits for room that another one has, which may wait for those slots."""
        for work in list(self._soon):
            self.forgo(work)

    def ask(self, work: Job) -> None:
        """Have the worker before compute and send what lies before this worker's span, but for blocks that are here."""
        self._soon.discard(work)
        load, work.asked = work.asked, None
        if load is not None and load.failure is None:
            load.take_pages(work.pages[: load.until])
        else:
            try:
                load = self._ask(work, work.start // self._size, work.pages)
            except MoonpoolError as e:
                log.warning("the worker before is not asked, its blocks are computed here: %s", e)
                self._counts["spans_alone"] += 1
                self._require_time(work, work.start, Failure.of(e))
                return
        if load is None:
            return
        work.span, work.one_pass = load, True
        work.loads.append(load)
        work.start = load.until * self._size
        watching = asyncio.create_task(self._watch(work, load))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    def _ask(self, work: Job, have_blocks: int, pages: Sequence[int] | None) -> SpanLoad | None:
        """``pages``: of its blocks, where it has them already. None: nothing is missing. PeerSilent: it could not land here."""
        helpers, attempt = work.job.helpers, work.job.attempt
        if work.ended() or not helpers or helpers[-1].until <= have_blocks:
            return None
        *before, last = [helper for helper in helpers if helper.until > have_blocks]
        name = (attempt.request.id, attempt.number)
        load = SpanLoad(have_blocks, last.until, self._layers, self._handoffs, name, last.worker.id)
        job = self._job(work, last, tuple(before), have_blocks)
        if pages is None:
            self._handoffs.begin(job, last.worker, (), load, blocks=last.until)
        else:
            self._handoffs.begin(job, last.worker, pages[: last.until], load)
        return load

    def _job(self, work: Job, last: Helper, before: tuple[Helper, ...], have_blocks: int) -> PrefillJob:
        attempt, until = work.job.attempt, last.until
        # Only their KV is wanted, no id.
        request = replace(
            attempt.request,
            prompt=work.tokens[: until * self._size],
            keys=tuple(work.keys[:until]),
            sampling=SamplingParams(max_tokens=0),
        )
        left_ms = max(int(self._left_s(work) * 1e3), 1)
        cut = replace(attempt, request=request, emitted=(), deadline_ms=left_ms, siblings=())
        return PrefillJob(cut, work.job.segments, self._here, self._here.node, have_blocks, before, one_pass=True)

    def _left_s(self, work: Job) -> float:
        return work.job.attempt.deadline_ms / 1e3 - (time.monotonic() - work.life.at[Instant.QUEUED])

    async def _watch(self, work: Job, load: SpanLoad) -> None:
        """A worker before this one that is busy or slow is not waited for longer than going on without it would take. So long
        the job counts as one that goes on."""
        blocks_s = self._pace.seconds(load.trusted * self._size)
        rest_s = self._pace.seconds(len(work.tokens) - load.first * self._size)
        while not load.over and load.failure is None:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            still_s = now - (load.last_came or load.asked)
            since_first_s = now - load.first_came if load.first_came else 0.0
            if not worth_waiting(still_s, since_first_s, load.came / load.slices, blocks_s, rest_s):
                load.give_up(f"{load.helper} has sent {load.came} of {load.slices} slices in {now - load.asked:.1f} s")
            work.went_on()  # the compute thread waits for good reason, which may be longer than anything may stand still

    async def alone(self, work: Job, load: SpanLoad) -> bool:
        """``load`` is lost. True once nothing of it touches the pages any more, where there is time to compute its blocks here;
        False where the job has ended, now or before."""
        load.give_up("nobody waits for it")
        await load.ended()
        failure, landing = load.failure, work.landing
        if work.ended() or landing is None or failure is None:
            return False
        posted = asyncio.create_task(landing.posted())  # of its blocks, out of pages that are about to be written again
        if not await work.done_or_ended(posted):
            posted.cancel()
            return False
        log.warning("the blocks before are computed here: %s", failure.message)
        self._counts["spans_alone"] += 1
        work.one_pass = work.job.one_pass
        return self._require_time(work, load.first * self._size, replace(failure, peer=failure.peer or load.helper))

    def _require_time(self, work: Job, start: int, why: Failure) -> bool:
        """Whether ``work`` can be computed from token ``start`` on in the time that it has left. Where not it ends with ``why``
        at once, so that the next attempt avoids what was lost."""
        if self._pace.seconds(len(work.tokens) - start) <= self._left_s(work):
            return True
        work.fail(why)
        return False

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)


def require_spans(helpers: Sequence[Helper], tokens: int, block_tokens: int, here: MemberId) -> None:
    """InvalidRequest unless the spans of ``helpers`` follow one another and leave something of ``tokens`` tokens to ``here``,
    and all are of different workers: one that is asked a second time would take that for the same attempt, and refuse."""
    if len(helpers) >= MOST_IN_GROUP:
        raise InvalidRequest(
            f"helpers: {len(helpers)} of them and {here} are more than the {MOST_IN_GROUP} workers that a group may have; "
            "name fewer",
            param="helpers",
        )
    names = [*(helper.worker.id for helper in helpers), here]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise InvalidRequest(
            f"helpers: {', '.join(repeated)} would compute several spans; name each worker once", param="helpers"
        )
    ends = [helper.until for helper in helpers]
    if ends and (sorted(set(ends)) != ends or ends[0] < 1 or ends[-1] * block_tokens >= tokens):
        raise InvalidRequest(
            f"helpers: their spans end before blocks {ends} of {tokens} tokens; each must end later and leave a token",
            param="helpers",
        )
