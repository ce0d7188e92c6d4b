"""A request on its way through the simulated cluster, and one attempt at it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from hashlib import blake2b

from moonpool.core.blocks import KEY_BYTES, ROOT, BlockHasher
from moonpool.core.ids import RequestId
from moonpool.core.landing import Landing
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.core.use import Use
from moonpool.decode_worker.sequence import Sequence
from moonpool.kvstore.handoffs.sink import HandoffSink
from moonpool.prefill_worker.chunk_planner import JobKey
from moonpool.prefill_worker.handoff_source import HandoffSource
from moonpool.sim.clock import Timer
from moonpool.sim.links import Flow
from moonpool.sim.outcome import RequestOutcome
from moonpool.sim.prefix import Prefix

TOKEN = 0  # every id: the simulator computes none


class NoHasher(BlockHasher):
    """Keys come with the trace; blocks of answers have names that nobody asks for."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(b"", ROOT, block_tokens)

    def keys(self, ids: Values[int], *, known: Values[bytes] = ()) -> list[bytes]:
        return list(known)


def answer_keys(request: str, blocks: Iterable[int]) -> list[bytes]:
    """Of blocks that end in an answer: the trace has none, and no other prompt has them."""
    return [blake2b(f"{request} {block}".encode(), digest_size=KEY_BYTES).digest() for block in blocks]


@dataclass(slots=True, eq=False)
class SimRequest:
    """``wanted`` output tokens in all, of which ``emitted`` were streamed by attempts that are over."""

    id: str
    keys: tuple[bytes, ...]
    prompt_tokens: int
    wanted: int
    use: Use
    outcome: RequestOutcome
    emitted: int = 0
    attempts: int = 0
    exclude: tuple[str, ...] = ()
    live: Try | None = None
    first_at: float | None = None
    begun: bool = False  # a prefill of it has begun
    over: bool = False
    deadline: Timer | None = None


@dataclass(slots=True, eq=False)
class Try:
    """One attempt: the production state machines at both ends, and what the simulator knows of it."""

    request: SimRequest
    number: int
    placement: Placement
    sequence: Sequence
    source: HandoffSource
    tokens: int  # prompt and ids already emitted
    ends_at: int  # tokens: with its last id, or where its decode worker has no more room
    sink: HandoffSink | None = None
    landing: Landing | None = None
    prefix: Prefix | None = None
    pages: list[int] = field(default_factory=list)
    flow: Flow | None = None
    queued_at: float = 0.0
    begun_at: float | None = None
    prefill_s: float = 0.0
    cached: int = 0
    first_at: float | None = None
    joined_at: int | None = None  # number of the decode node's run from which on it gets a token a step
    spans: list[tuple[int, int]] = field(default_factory=list)  # runs [begin, end) of the times before that
    pause_s: float = 0.0  # between its first token and its first step
    paused: list[tuple[int, float]] = field(default_factory=list)  # (run, seconds) of later waits: preemptions
    preempted_at: float | None = None  # it waits for its next token since
    over: bool = False
    before: Try | None = None  # of a group: what its worker asked of the one before
    after: Try | None = None  # of a group: whose span begins where this one ends
    handed_on: bool = False  # all of it has come to the one after
    computes_at: float = 0.0  # when its first layer is begun
    layer_s: float = 0.0

    @property
    def begin(self) -> int:
        """Of a group: the first token of its span."""
        return self.before.tokens if self.before is not None else 0

    @property
    def found(self) -> int:
        """Tokens that nobody had to compute."""
        return self.cached if self.before is None else self.before.found

    @property
    def spent_s(self) -> float:
        """Seconds of prefill, of all its workers."""
        return self.prefill_s + (self.before.spent_s if self.before is not None else 0.0)

    @property
    def key(self) -> JobKey:
        return self.request.id, self.number

    @property
    def left(self) -> int:
        """Ids still to come."""
        return self.ends_at - len(self.sequence.tokens)


def new_try(request: SimRequest, placement: Placement, hasher: NoHasher, limit: int) -> Try:
    number = request.attempts
    attempt = Attempt(
        Request(
            id=RequestId(request.id),
            prompt=(TOKEN,) * request.prompt_tokens,
            sampling=SamplingParams(request.wanted),
            namespace=ROOT,
            keys=request.keys,
            tenant=request.use.tenant,
            turn=request.use.turn,
        ),
        number,
        (TOKEN,) * request.emitted,
    )
    remote = placement.prefill.id != placement.decode.id
    return Try(
        request,
        number,
        placement,
        Sequence(attempt, hasher, limit, remote),
        HandoffSource(request.id, number, 1),
        request.prompt_tokens + request.emitted,
        min(request.prompt_tokens + request.wanted, limit),
    )
