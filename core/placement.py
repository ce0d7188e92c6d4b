"""The conductor's answer: a placement (advice) or a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moonpool.core.errors import Reason
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.request import Targets


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """Where a worker is: its name, life, node and gRPC address (host:port)."""

    id: MemberId
    incarnation: Incarnation
    node: NodeId
    address: str


class Source(StrEnum):
    REUSE = "reuse"  # in the prefill worker's own device pages
    FETCH = "fetch"  # from the pool: ``node`` holds it
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks ``[first, first + count)`` of the prompt come from ``source``."""

    first: int
    count: int
    source: Source
    node: NodeId | None = None
    move: bool = False  # the source's copy is first to evict once fetched: a move, not a copy


MOST_IN_GROUP = 16  # workers on one prompt


@dataclass(frozen=True, slots=True)
class Helper:
    """``worker`` computes one span of a long prompt: it ends before block ``until`` and begins where the one before ends."""

    worker: WorkerRef
    until: int


@dataclass(frozen=True, slots=True)
class Placement:
    """``prefill == decode`` means a local hand-off (role ``both``). Segments cover the prompt's whole blocks in order.

    ``helpers`` compute what lies before the span of ``prefill``, each its own span, in prompt order; segments are then
    what the first of them finds.

    The last prompt token is computed even where its block is reused or fetched. Predictions are 0 while the conductor
    has no fitted estimate.
    """

    prefill: WorkerRef
    decode: WorkerRef
    segments: tuple[Segment, ...] = ()
    predicted_ttft_ms: float = 0.0
    predicted_tbt_ms: float = 0.0
    booking: int = 0  # the conductor's number for what it booked; given back with ``Finished``
    helpers: tuple[Helper, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Later:
    """No prefill worker is about to be free: the answer comes once one is. 0 ms while there is no fitted estimate."""

    request: str
    attempt: int
    predicted_ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """What the gateway asks. ``exclude`` are peers that failed an earlier attempt."""

    request: str
    attempt: int
    keys: tuple[bytes, ...]
    prompt_tokens: int
    max_tokens: int
    targets: Targets = field(default_factory=Targets)
    tenant: str = "default"
    exclude: tuple[MemberId, ...] = ()
    priority: int = 0  # larger is more urgent, among requests of its tenant
    turn: int = 1  # of its session, from 1
    kind: str = ""  # of traffic, as in ``core.use.Use``
    weight: float = 1.0  # of its tenant, where tenants compete
    choices: int = 1  # sequences that decode from the one prompt; 0 means 1


@dataclass(frozen=True, slots=True)
class Finished:
    """What the gateway measured once an attempt ended, however it ended; 0 where something did not happen.

    ``outcome`` is ``ok`` (the attempt ended its request) or the ``Reason`` why it did not.
    """

    request: str
    attempt: int
    booking: int
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    outcome: str = "ok"
