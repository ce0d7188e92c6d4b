"""One attempt inside a worker: its tokens, its pages and how far its KV has come. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from moonpool.core.blocks import BlockHasher
from moonpool.core.gaps import Gaps
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt
from moonpool.core.use import Use
from moonpool.engine.prompt_scores import PromptScores


class Phase(StrEnum):
    FOLLOWING = "following"  # another sequence has the same prompt computed; not in the batcher
    WAITING = "waiting"  # no pages
    FILLING = "filling"  # pages taken; a hand-off or a prefix load brings KV into them
    RUNNING = "running"  # in the batch
    OVER = "over"


@dataclass(frozen=True, slots=True)
class CompletedBlock:
    """A whole block whose KV is in ``page``. The page is held once more for whoever publishes the block elsewhere."""

    key: bytes
    parent: bytes | None
    page: int
    use: Use = field(default_factory=Use)
    of: Sequence | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False, slots=True)
class Sequence:
    """``tokens`` are the prompt, the ids of earlier attempts and the ids of this one; the last sampled id has no KV yet.

    ``computed`` tokens have their KV in ``pages``. ``keys`` name the leading whole blocks of ``tokens`` as far as they
    are known; ``published`` of them have been offered to the device-page index. ``remote``: another worker computes the
    prompt. ``limit``: tokens at which it ends whatever it wants (context, or all pages there are). ``scores``: takes the
    log-probabilities of the prompt where it is computed here and they are wanted. ``siblings`` draw from the same prompt and
    follow this sequence until they are forked. ``due``: when its first id is wanted, infinite where no target says so; ``gaps``
    are kept from that id on.
    """

    attempt: Attempt
    hasher: BlockHasher
    limit: int
    remote: bool
    order: int = 0
    tokens: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    in_step: bool = False
    scores: PromptScores | None = None
    siblings: list[Sequence] = field(default_factory=list)
    due: float = inf
    gaps: Gaps | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.attempt.context)
        self.keys = self.hasher.keys(self.tokens, known=self.attempt.request.keys)
        self.scores = None if self.remote else PromptScores.of(self.attempt)

    @property
    def name(self) -> tuple[RequestId, int]:
        return self.attempt.request.id, self.attempt.number

    @property
    def outputs(self) -> list[int]:
        """All output ids so far, those of earlier attempts included: its length is the next position."""
        return self.tokens[len(self.attempt.request.prompt) :]

    @property
    def left(self) -> int:
        """Tokens without KV; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed

    def reusable(self, block_tokens: int) -> int:
        """Leading blocks that need not be computed here: where log-probabilities are wanted, those that gave theirs."""
        if self.scores is None or self.scores.complete:
            return len(self.keys)
        return self.scores.done // block_tokens

    def block(self, index: int) -> CompletedBlock:
        """Block ``index``, one of those that are ``published``."""
        parent = self.keys[index - 1] if index else None
        return CompletedBlock(self.keys[index], parent, self.pages[index], self.attempt.request.use, self)

    def whole_blocks(self, block_tokens: int) -> int:
        """Blocks whose KV is complete; their keys are made known."""
        n = self.computed // block_tokens
        if n > len(self.keys):
            self.keys = self.hasher.keys(self.tokens[: n * block_tokens], known=self.keys)
        return n
