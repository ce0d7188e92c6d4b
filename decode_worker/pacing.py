"""How large a step may be: prompts beside running answers, by what steps took here and what each answer can bear. Pure.

An answer bears what its TBT target says (``core.gaps``), or ``gap_s`` where it has none. ``now`` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.core.gaps import Gaps, Room, tightest
from moonpool.decode_worker.batcher import ChunkRoom, Step, StepRow
from moonpool.decode_worker.sequence import Sequence
from moonpool.scheduler.chunk_size import USUAL, Chunking, Prompt, StepCost, Work


class Pacing:
    def __init__(self, *, gap_s: float, chunk_tokens: int) -> None:
        """``gap_s``: infinite where answers without a target bear anything."""
        self._gap_s = gap_s
        self._large, self._usual = Chunking(chunk_tokens), Chunking(min(chunk_tokens, USUAL))
        self.cost = StepCost()

    def room(self, decoding: Iterable[Sequence], now: float) -> Room:
        """Until the first of these sequences wants its next id."""
        return tightest(s.gaps.room(self._target_s(s), now) for s in decoding if s.gaps is not None)

    def alone_s(self, decoding: Iterable[Sequence]) -> float:
        """A step of these sequences and nothing else."""
        contexts = [len(s.tokens) for s in decoding]
        return self.cost.seconds(Work(len(contexts), sum(contexts)))

    def chunks(self, room: Room, now: float, *, joining: bool = False) -> ChunkRoom:
        """For ``Batcher.plan`` at once. ``joining``: an answer whose first id is told may come amid the step, and wait then."""

        def tokens(rows: list[StepRow], sequence: Sequence) -> int:
            prompt = Prompt(sequence.computed, len(sequence.tokens), sequence.due - now)
            scored = sequence.scores is not None  # its chunks have a row of logits for each token
            chunking = self._usual if joining or scored else self._large
            return chunking.tokens(self.cost, work_of(rows), room, prompt)

        return tokens

    def measured(self, step: Step, seconds: float) -> None:
        """A step that is computed."""
        self.cost.add(work_of(step.rows), seconds)

    def told(self, sequence: Sequence, now: float) -> None:
        """``sequence`` got an id."""
        if sequence.gaps is None:
            sequence.gaps = Gaps(now)
        else:
            sequence.gaps.told(now)

    def _target_s(self, sequence: Sequence) -> float:
        target_ms = sequence.attempt.request.targets.tbt_ms
        return self._gap_s if target_ms is None else target_ms / 1e3


def work_of(rows: Iterable[StepRow]) -> Work:
    work = Work()
    for row in rows:
        one = row.end - row.start == 1
        work = work.with_row(row.end) if one else work.with_chunk(row.start, row.end)
    return work
