"""Continuous batching: who holds pages, who computes in the next step, who gives its pages up. Pure.

Admission takes pages for everything a sequence has so far, in order of arrival, and never touches the growth reserve
while others run. Running sequences grow page by page; when none is left, the youngest running one is preempted: its
pages go (whole blocks stay findable), and it waits at the front to be recomputed. The oldest running one is never
preempted. One plan serves decode rows and prompt chunks: a row is a span of tokens, and the row that reaches the last
token samples. How many tokens of prompts a step takes beside rows that decode is asked of whoever plans (``ChunkRoom``).

A step is planned, computed elsewhere, then told with ``complete``; between the two nothing that its rows use changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from moonpool.core.blocks import blocks_for, chunk_end
from moonpool.core.errors import Bug, Busy
from moonpool.decode_worker.runs import Pace, Run
from moonpool.decode_worker.sequence import CompletedBlock, Phase, Sequence
from moonpool.engine.pages import OutOfPages, PagePool


@dataclass(frozen=True, slots=True)
class Limits:
    block_tokens: int
    max_batch: int  # sequences with pages, and rows of a step
    chunk_tokens: int  # prompt tokens per step, all chunks together
    growth_reserve: float  # share of pages that admission leaves to running sequences
    queue_limit: int  # sequences without pages
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """``sequence`` has its pages; ``matched`` leading blocks were in them already.

    ``copy``: (shared page, private page) to copy before anything is computed. The whole prompt was cached and its last
    token is computed again; the shared page is held until ``copied``.
    """

    sequence: Sequence
    matched: int
    copy: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens ``[start, end)`` of ``sequence``; ``samples`` when its next id is drawn from the last one."""

    sequence: Sequence
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    rows: tuple[StepRow, ...]


GRAIN = 16  # tokens: borders on which chunks end that are cut short for rows that decode

# How many tokens of a sequence's prompt may join a step with these rows. Of the first prompt, the next ``GRAIN`` always may.
ChunkRoom = Callable[[list[StepRow], Sequence], int]


class Batcher:
    """Owner of every sequence of one worker, and of its share of ``pages``. One thread."""

    def __init__(self, pages: PagePool, limits: Limits) -> None:
        self._pages = pages
        self._limits = limits
        self._waiting: list[Sequence] = []  # by order
        self._holding: list[Sequence] = []  # with pages, by order
        self._step: Step | None = None
        self._order = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def holding(self) -> int:
        return len(self._holding)

    @property
    def running(self) -> int:
        return sum(1 for s in self._holding if s.phase is Phase.RUNNING)

    @property
    def expecting(self) -> bool:
        """A hand-off may join between any two steps, with its first id told already."""
        return any(s.remote and s.phase is Phase.FILLING for s in self._holding)

    def decoding(self) -> list[Sequence]:
        """Sequences that get an id from every step."""
        return [s for s in self._holding if s.phase is Phase.RUNNING and s.left == 1]

    def add(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> None:
        """Queue it. Busy when the queue is full: nothing was kept. ``siblings`` follow it until they are forked."""
        if len(self._waiting) >= self._limits.queue_limit:
            raise Busy(f"{len(self._waiting)} sequences wait here, timing.queue_limit is {self._limits.queue_limit}")
        sequence.siblings = list(siblings)
        for one in (sequence, *sequence.siblings):
            self._order += 1
            one.order = self._order
        self._waiting.append(sequence)

    def admit(self) -> list[Admission]:
        """Give pages to waiting sequences, first come first served. They are ``FILLING`` until ``join``."""
        admitted: list[Admission] = []
        while self._waiting and len(self._holding) < self._limits.max_batch:
            admission = self._take_pages(self._waiting[0])
            if admission is None:
                break
            self._waiting.pop(0)
            admission.sequence.phase = Phase.FILLING
            self._insert(self._holding, admission.sequence)
            admitted.append(admission)
        return admitted

    def copied(self, admission: Admission) -> None:
        """The private copy is made: the shared page is held no longer."""
        if admission.copy is not None:
            self._pages.release([admission.copy[0]])

    def join(self, sequence: Sequence, computed: int) -> list[CompletedBlock]:
        """The KV of ``computed`` leading tokens is in its pages: it takes part in steps from now on."""
        if sequence.phase is not Phase.FILLING or not 0 <= computed <= len(sequence.tokens):
            raise Bug(f"batcher: {sequence.name} joins in phase {sequence.phase} with {computed} tokens")
        sequence.phase = Phase.RUNNING
        sequence.computed = computed
        return self._publish(sequence)

    def fork(self, lead: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """``sibling`` goes on from the prompt of ``lead``, whose KV is in pages, with a first id of its own.

        Whole pages are shared; (page, copy) of an unfinished one is to be copied before anything more is computed. Where
        there is no room ``sibling`` waits, and what is not found in device pages by then is computed again.
        """
        prompt = len(sibling.tokens) - 1
        if lead.phase is not Phase.RUNNING or sibling.phase is not Phase.FOLLOWING or lead.computed != prompt:
            raise Bug(f"batcher: {sibling.name} cannot follow {lead.name} in phase {lead.phase}, {lead.computed} of {prompt}")
        whole, tail = divmod(prompt, self._limits.block_tokens)
        fresh = self._room_for(1 if tail else 0)
        if fresh is None:
            sibling.phase, sibling.remote = Phase.WAITING, False
            self._insert(self._waiting, sibling)
            return None
        self._pages.retain(lead.pages[:whole])
        sibling.pages = lead.pages[:whole] + fresh
        sibling.phase, sibling.computed, sibling.published = Phase.RUNNING, prompt, min(lead.published, whole)
        self._insert(self._holding, sibling)
        return (lead.pages[whole], fresh[0]) if tail else None

    def _room_for(self, pages: int) -> list[int] | None:
        """``pages`` for one more sequence beside others; None where there is no room."""
        reserve = int(self._limits.growth_reserve * self._pages.total)
        if len(self._holding) >= self._limits.max_batch or self._pages.free + self._pages.cached - pages < reserve:
            return None
        try:
            return self._pages.allocate(pages)
        except OutOfPages:
            return None

    def plan(self, room: ChunkRoom | None = None) -> Step | None:
        """The next step, or None when nobody can compute. Grows and preempts; ``complete`` must follow.

        Without ``room`` prompts take as many tokens as ``Limits`` let them.
        """
        if self._step is not None:
            raise Bug("batcher: planned while a step is under way")
        rows = [StepRow(s, s.computed, len(s.tokens), True) for s in self._grow_all()]
        rows += self._chunks(rows, room)
        if not rows:
            return None
        for row in rows:
            row.sequence.in_step = True
        self._step = Step(tuple(rows))
        return self._step

    def complete(self, step: Step, sampled: Iterable[int | None]) -> list[CompletedBlock]:
        """``step`` was computed; ``sampled`` holds an id for every row that samples, in order of rows.

        Sequences that ended meanwhile let go of their pages now; their ids are ignored.
        """
        done: list[CompletedBlock] = []
        for row, token in zip(self._take_step(step), sampled, strict=True):
            sequence = row.sequence
            sequence.in_step = False
            if sequence.phase is Phase.OVER:
                self._let_go(sequence)
                continue
            sequence.computed = row.end
            done += self._publish(sequence)
            if token is not None:
                sequence.tokens.append(token)
        return done

    def abandon(self, step: Step) -> None:
        """``step`` was not computed: its pages hold garbage past what was computed before."""
        for row in self._take_step(step):
            row.sequence.in_step = False
            if row.sequence.phase is Phase.OVER:
                self._let_go(row.sequence)

    def steady(self, pace: Callable[[int], Pace], left: Callable[[Sequence], int]) -> Run | None:
        """The decode steps until something changes: a sequence has ``left`` its last id, or pages run out.

        ``pace`` of a batch of so many. Nothing happens yet. None where steps differ: nobody computes, or one computes its
        prompt; where pages are short at once, so that ``plan`` must preempt; or while a step is under way.
        """
        running = [s for s in self._holding if s.phase is Phase.RUNNING]
        if self._step is not None or not running or any(s.left != 1 for s in running):
            return None
        steps = self._paged(running, max(min(map(left, running)), 1))
        if not steps:
            return None
        context = sum(len(s.tokens) for s in running)
        each = pace(len(running))
        first_s = each.base_s + each.per_token_s * context
        return Run(steps, len(running), context, first_s, each.per_token_s * len(running))

    def run_until_change(
        self, pace: Callable[[int], Pace], left: Callable[[Sequence], int], token: int, until_s: float = inf
    ) -> tuple[Run | None, list[CompletedBlock]]:
        """Do those steps at once, as so many calls of ``plan`` and ``complete`` with ``token`` sampled everywhere would.

        They end with the first step that ends ``until_s`` from now or later: whoever joins meanwhile joins there.
        """
        run = self.steady(pace, left)
        if run is None:
            return None, []
        if until_s < run.seconds:
            run = replace(run, steps=min(run.done_by(until_s), run.steps))
        done: list[CompletedBlock] = []
        for sequence in self._holding:
            if sequence.phase is not Phase.RUNNING:
                continue
            before_last = len(sequence.tokens) + run.steps - 1
            lack = blocks_for(before_last, self._limits.block_tokens) - len(sequence.pages)
            if lack > 0:
                sequence.pages += self._pages.allocate(lack)
            sequence.tokens.extend([token] * run.steps)
            sequence.computed = before_last
            done += self._publish(sequence)
        return run, done

    def _paged(self, running: list[Sequence], steps: int) -> int:
        """How many of ``steps`` there are pages for."""
        size, room = self._limits.block_tokens, self._pages.free + self._pages.cached
        held = [(len(s.tokens) - 1, len(s.pages)) for s in running]

        def fits(n: int) -> bool:
            return sum(max(blocks_for(tokens + n, size) - pages, 0) for tokens, pages in held) <= room

        if fits(steps):
            return steps
        low, high = 0, steps  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def end(self, sequence: Sequence) -> None:
        """Finished, failed or cancelled, in any phase; twice is a no-op. Pages go at once, or when its step is over."""
        if sequence.phase is Phase.OVER:
            return
        held = sequence.phase is not Phase.WAITING
        sequence.phase = Phase.OVER
        (self._holding if held else self._waiting).remove(sequence)
        if held and not sequence.in_step:
            self._let_go(sequence)

    def _take_pages(self, sequence: Sequence) -> Admission | None:
        limits, pages = self._limits, self._pages
        matched = pages.match(sequence.keys[: sequence.reusable(limits.block_tokens)]) if limits.reuse else []
        need = blocks_for(len(sequence.tokens), limits.block_tokens) - len(matched)
        # One token must be computed here to sample from, and it is written: its page may not be shared.
        private = not sequence.remote and len(matched) * limits.block_tokens >= len(sequence.tokens)
        reserve = int(limits.growth_reserve * pages.total) if self._holding else 0
        room = pages.free + pages.cached - need - private >= reserve
        try:
            fresh = pages.allocate(need + private) if room else None
        except OutOfPages:
            fresh = None
        if fresh is None:
            pages.release(matched)
            return None
        sequence.computed = min(len(matched) * limits.block_tokens, len(sequence.tokens) - (0 if sequence.remote else 1))
        sequence.published = len(matched) - private
        if not private:
            sequence.pages = matched + fresh
            return Admission(sequence, len(matched))
        sequence.pages = matched[:-1] + fresh
        return Admission(sequence, len(matched), (matched[-1], fresh[0]))

    def _grow_all(self) -> list[Sequence]:
        """Running sequences with one token to compute and the page for it, oldest first."""
        ready: list[Sequence] = []
        for sequence in list(self._holding):
            if sequence.phase is Phase.RUNNING and sequence.left == 1 and self._grow(sequence):
                ready.append(sequence)
        return [s for s in ready if s.phase is Phase.RUNNING]

    def _grow(self, sequence: Sequence) -> bool:
        while len(sequence.pages) < blocks_for(len(sequence.tokens), self._limits.block_tokens):
            try:
                sequence.pages += self._pages.allocate(1)
            except OutOfPages:
                running = [s for s in self._holding if s.phase is Phase.RUNNING]
                if len(running) < 2:
                    return False  # the oldest waits: sequences that fill now can give pages up once they run
                self._preempt(running[-1])
                if running[-1] is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Its tokens stay, its KV is computed again later, here."""
        self._holding.remove(sequence)
        self._let_go(sequence)
        sequence.phase, sequence.remote, sequence.computed, sequence.published = Phase.WAITING, False, 0, 0
        self.preemptions += 1
        self._insert(self._waiting, sequence)

    def _chunks(self, decoding: list[StepRow], room: ChunkRoom | None) -> list[StepRow]:
        """Prompt chunks in order of arrival, as many tokens as one step takes."""
        rows: list[StepRow] = []
        left = self._limits.chunk_tokens
        for s in self._holding:
            if s.phase is not Phase.RUNNING or s.left <= 1:
                continue
            budget = left if room is None else min(left, room([*decoding, *rows], s))
            if rows and budget < min(self._limits.block_tokens, s.left):
                break  # a chunk ends on a block border, so it would overdraw the budget
            border = self._limits.block_tokens if budget == left else GRAIN
            end = chunk_end(s.computed, len(s.tokens), budget, border)
            rows.append(StepRow(s, s.computed, end, end == len(s.tokens)))
            left -= end - s.computed
            if left <= 0:
                break
        return rows

    def _publish(self, sequence: Sequence) -> list[CompletedBlock]:
        """Offer blocks that became whole to the device-page index; each is held once more for the caller."""
        if not self._limits.reuse:
            return []
        whole = sequence.whole_blocks(self._limits.block_tokens)
        done: list[CompletedBlock] = []
        for i in range(sequence.published, whole):
            block = sequence.block(i)
            self._pages.publish(block.page, block.key, block.parent)
            self._pages.retain([block.page])
            done.append(block)
        sequence.published = max(sequence.published, whole)
        return done

    def _let_go(self, sequence: Sequence) -> None:
        pages, sequence.pages = sequence.pages, []
        self._pages.release(pages)

    def _take_step(self, step: Step) -> tuple[StepRow, ...]:
        if step is not self._step:
            raise Bug("batcher: told of a step that is not under way")
        self._step = None
        return step.rows

    @staticmethod
    def _insert(into: list[Sequence], sequence: Sequence) -> None:
        into.append(sequence)
        into.sort(key=lambda s: s.order)
