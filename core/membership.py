"""Who is in the cluster, and what they say about themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout


class Liveness(StrEnum):
    LIVE = "live"
    SILENT = "silent"  # missed heartbeats or a broken stream: may still write; its slots are fenced
    GONE = "gone"  # proved dead (pidfd), left on its own word, or replaced by a newer incarnation


PROTOCOL = 3  # of what members say to one another: counted up where an older member would not understand a newer one


@dataclass(frozen=True, slots=True)
class Member:
    """One life of one process. ``ready`` is false while it loads or drains: it is then given no new work.

    Members of one ``protocol`` work together, whatever the ``version`` of their packages: so they can be exchanged one by one.
    """

    id: MemberId
    role: Role
    node: NodeId
    incarnation: Incarnation
    address: str  # gRPC host:port
    pid: int
    layout: KVLayout | None = None  # workers and store nodes
    model: str = ""  # the name users give in requests
    hash_key_id: str = ""
    max_context: int = 0
    max_prompt: int = 0  # tokens this worker can hold at once (prefill: its pages; decode: its pages)
    ready: bool = True
    details: dict[str, str] = field(default_factory=dict)  # shown by `status`: carrier, model path, dtype
    kv_key_id: str = ""  # where KV bytes are encrypted
    protocol: int = PROTOCOL
    version: str = ""
    term: int = 0  # conductors: in which it leads; 0: it does not


@dataclass(frozen=True, slots=True)
class MemberChange:
    member: Member
    liveness: Liveness
    proof: str = ""  # why it is silent or gone


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """An attempt a worker is busy with: bookings are rebuilt from these."""

    request: str
    attempt: int
    prompt_tokens: int
    remaining_tokens: int  # prefill: tokens still to compute; decode and both: output tokens still possible
    prompt_left: int = 0  # role both: prompt tokens still to compute
    output_tokens: int = 0  # decode and both: produced so far by this attempt and those before it
    running: bool = False  # prefill: it is the one being computed


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """Measured: the job held the worker for ``seconds``, from being taken up to its first token, loading included.

    ``prompt_tokens - cached_tokens`` tokens were computed. Of the cached ones ``loaded_tokens`` came from the pool, the
    others lay in device pages. ``load_seconds`` is the part of ``seconds`` spent waiting for loads, ``fetch_seconds`` the
    part of that in which blocks came from other nodes: that is the links' doing.
    """

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    load_seconds: float = 0.0
    loaded_tokens: int = 0
    fetch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Measured: one decode step of ``batch`` sequences with ``context_tokens`` in all took ``seconds``."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Measured: ``bytes`` of KV came from the store of ``source`` to ``target`` in ``seconds``, asking for it included."""

    source: NodeId
    target: NodeId
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Sent to every conductor about four times a second and after each prefill; once a second where nothing happens.

    ``attempts`` lists everything the worker holds, queued or running. ``free_pages`` counts pages that a new sequence
    could take: free ones and cached ones nobody uses. ``g1_frames`` are the changes of the device pages since the last
    report: ``wire.frames`` event batches (or a snapshot) whose holder is the worker.
    """

    worker: MemberId
    incarnation: Incarnation
    attempts: tuple[LiveAttempt, ...] = ()
    free_pages: int = 0
    total_pages: int = 0
    prefills: tuple[PrefillTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    g1_frames: tuple[bytes, ...] = ()
    links: tuple[LinkTiming, ...] = ()


class Peers(Protocol):
    """The cluster as one process sees it: kept fresh by its registry session; used on that process's event loop only."""

    def get(self, member: MemberId) -> MemberChange | None:
        """The newest life of ``member``, whatever its liveness."""

    def live(self, role: Role) -> list[Member]:
        """Live members of ``role`` (ready or not), ordered by id."""

    def store_of(self, node: NodeId) -> Member | None:
        """The live store node of ``node``."""

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        """Call ``on_change`` for everybody known, then for every change; returns the way to stop it."""


class Service(Protocol):
    """What the process shell of ``cluster`` needs from every role's service object."""

    def numbers(self) -> dict[str, float]:
        """Gauges and counters, by stable snake_case name: pages, pins, slots, queues (admin service and /metrics)."""

    def words(self) -> dict[str, str]:
        """Facts in words: carrier and UCX transport really used, model, layout."""

    def report(self) -> WorkerReport | None:
        """State and new timings since the last report; None for roles that report nothing."""

    async def close(self) -> None:
        """Leave in order: end sessions, join threads, free memory. Called once."""
