"""The batcher under random loads: nothing is lost, nothing is computed twice at once, pages balance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.blocks import BlockHasher, blocks_for
from moonpool.core.errors import Bug
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.decode_worker.batcher import Admission, Batcher, Limits
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.engine.pages import PagePool

BLOCK = 16


def sequence(name: str, tokens: int, *, kind: int = 0, remote: bool = False, limit: int = 10_000) -> Sequence:
    """Sequences of one ``kind`` share their prompt's beginning."""
    hasher = BlockHasher(bytes(32), bytes(16), BLOCK)
    prompt = tuple(kind * 1_000 + i for i in range(tokens))
    request = Request(RequestId(name), prompt, SamplingParams(100), bytes(16), tuple(hasher.keys(prompt)))
    return Sequence(Attempt(request, 1), hasher, limit, remote)


class Run:
    """A worker without a model: the id after n tokens is n. KV is a set of (page, offset) written by whom."""

    def __init__(self, pages: int, limits: Limits) -> None:
        self.pool = PagePool(pages)
        self.batcher = Batcher(self.pool, limits)
        self.filling: list[Admission] = []
        self.wants: dict[Sequence, int] = {}
        self.written: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.oldest_preempted = 0

    def add(self, seq: Sequence, outputs: int) -> None:
        self.batcher.add(seq)
        self.wants[seq] = len(seq.tokens) + outputs

    def admit(self) -> None:
        for admission in self.batcher.admit():
            if admission.copy:
                shared, private = admission.copy
                for offset in range(BLOCK):
                    self.written[private, offset] = self.written[shared, offset]
            self.batcher.copied(admission)
            self.check(admission.sequence, admission.sequence.computed)
            self.filling.append(admission)

    def join(self) -> None:
        seq = self.filling.pop(0).sequence
        if seq.phase is Phase.OVER:
            return
        n = len(seq.tokens) if seq.remote else seq.computed
        self.write(seq, seq.computed, n)
        if seq.remote:
            seq.tokens.append(n)  # the first token
        self.release(self.batcher.join(seq, n))

    def step(self, room: int | None = None) -> bool:
        """``room``: tokens of each prompt that may join; None: as many as there may be."""
        running = [s for s in self.wants if s.phase is Phase.RUNNING]
        oldest = min(running, key=lambda s: s.order, default=None)
        step = self.batcher.plan(None if room is None else lambda rows, sequence: room - len(rows))
        assert oldest is None or oldest.phase is Phase.RUNNING, "the oldest running sequence was preempted"
        if step is None:
            return False
        assert len(step.rows) <= 8
        for row in step.rows:
            self.check(row.sequence, row.start)
            self.write(row.sequence, row.start, row.end)
        done = self.batcher.complete(step, [row.end if row.samples else None for row in step.rows])
        self.release(done)
        for row in step.rows:
            if len(row.sequence.tokens) >= self.wants.get(row.sequence, 1 << 30):
                self.finish(row.sequence)
        return True

    def finish(self, seq: Sequence) -> None:
        self.batcher.end(seq)
        self.wants.pop(seq, None)

    def release(self, blocks: list) -> None:  # type: ignore[type-arg]
        self.pool.release([block.page for block in blocks])

    def write(self, seq: Sequence, start: int, end: int) -> None:
        for i in range(start, end):
            self.written[seq.pages[i // BLOCK], i % BLOCK] = seq.tokens[i]

    def check(self, seq: Sequence, computed: int) -> None:
        """Every position that counts as computed holds this sequence's own token."""
        assert len(seq.pages) >= blocks_for(computed, BLOCK)
        for i in range(computed):
            assert self.written[seq.pages[i // BLOCK], i % BLOCK] == seq.tokens[i]

    def drain(self) -> None:
        for _ in range(5_000):
            if not self.wants:
                return
            self.admit()
            while self.filling:
                self.join()
            assert self.step() or self.batcher.waiting, "nobody computes and nobody waits"
        raise AssertionError(f"not done: {[(s.name, s.phase) for s in self.wants]}")


OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remote", "admit", "join", "step", "step", "end"]),
        st.integers(1, 90),
        st.integers(0, 2),
        st.integers(1, 40),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ops=OPS, pages=st.integers(9, 24), chunk=st.integers(1, 100), reserve=st.sampled_from([0.0, 0.2]), reuse=st.booleans())
def test_random_loads_end_with_every_token_computed_and_every_page_back(
    ops: list[tuple[str, int, int, int]], pages: int, chunk: int, reserve: float, reuse: bool
) -> None:
    run = Run(pages, Limits(BLOCK, 8, chunk, reserve, 1_000, reuse))
    for n, (what, tokens, kind, outputs) in enumerate(ops):
        if what in ("add", "remote"):
            run.add(sequence(str(n), tokens, kind=kind, remote=what == "remote"), outputs)
        elif what == "admit":
            run.admit()
        elif what == "join" and run.filling:
            run.join()
        elif what == "step":
            run.step(None if kind == 2 else tokens)
        elif what == "end" and run.wants:
            run.finish(sorted(run.wants, key=lambda s: s.order)[tokens % len(run.wants)])
    run.drain()
    assert run.pool.used == 0
    assert run.batcher.holding == run.batcher.waiting == 0
    if not reuse:
        assert run.pool.cached == 0


def test_sequences_that_share_a_prefix_share_its_pages() -> None:
    run = Run(16, Limits(BLOCK, 8, 100, 0.0, 10))
    run.add(sequence("a", 40), 3)
    run.drain()
    run.add(sequence("b", 50), 3)
    run.admit()
    assert run.filling[0].matched == 2
    assert run.filling[0].sequence.computed == 32


def test_a_step_is_told_once() -> None:
    run = Run(8, Limits(BLOCK, 8, 100, 0.0, 10))
    run.batcher.add(sequence("a", 5))
    run.batcher.join(run.batcher.admit()[0].sequence, 0)
    step = run.batcher.plan()
    assert step is not None
    with pytest.raises(Bug, match="a step is under way"):
        run.batcher.plan()
    run.batcher.complete(step, [1])
    with pytest.raises(Bug, match="not under way"):
        run.batcher.complete(step, [1])


def test_ending_twice_is_a_no_op() -> None:
    run = Run(8, Limits(BLOCK, 8, 100, 0.0, 10))
    seq = sequence("a", 5)
    run.batcher.add(seq)
    run.batcher.end(seq)
    run.batcher.end(seq)
    assert run.batcher.waiting == 0
