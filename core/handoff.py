"""What a decode worker and a prefill worker say to one another about one attempt."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.errors import Failure
from moonpool.core.ids import NodeId
from moonpool.core.landing import Landing
from moonpool.core.membership import PrefillTiming
from moonpool.core.placement import Helper, Segment, WorkerRef
from moonpool.core.request import Attempt, PromptLogprobs, Sampled


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """``have_blocks`` leading blocks are in the decode worker's device pages already and are not sent.

    ``helpers`` compute what lies before this worker's span, in prompt order; the last of them is asked by this worker.
    ``one_pass``: the reader computes a span itself, each layer once all blocks of this job have that layer.
    """

    attempt: Attempt
    segments: tuple[Segment, ...]
    decode: WorkerRef
    store_node: NodeId  # whose store node grants the landing: the decode worker's host
    have_blocks: int = 0
    helpers: tuple[Helper, ...] = ()
    one_pass: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """Prefill has begun; its blocks will arrive in ``landing``."""

    landing: Landing


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The id at position ``len(attempt.emitted)``; with ``ends_request`` nothing joins the decode batch.

    ``sampled`` is None where none is wanted. ``siblings``: the first ids of the attempt's siblings, in their order.
    """

    sampled: Sampled | None
    cached_tokens: int
    ends_request: bool
    timing: PrefillTiming
    siblings: tuple[Sampled, ...] = ()

    @property
    def ids(self) -> tuple[Sampled, ...]:
        """Of the attempt and of its siblings; empty where none is wanted."""
        return () if self.sampled is None else (self.sampled, *self.siblings)

    @property
    def words(self) -> str:
        return ", ".join(str(one.token) for one in self.ids) or "none"


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer's local completions are in; it writes no more into ``landing``."""

    landing: int
    bytes_sent: int
    carrier: str


PrefillEvent = Begun | PromptLogprobs | FirstToken | Drained | Failure
