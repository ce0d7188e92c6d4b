"""What all simulated machines share, and the faces they know each other by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from moonpool.core.errors import Failure
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import MemberId, NodeId
from moonpool.core.landing import Landing
from moonpool.core.membership import Member, MemberChange, WorkerReport
from moonpool.core.placement import Refusal
from moonpool.sim.attempt import Try
from moonpool.sim.clock import Clock
from moonpool.sim.cluster import SimCluster
from moonpool.sim.costs import Noise
from moonpool.sim.links import Links
from moonpool.sim.store_node import StoreNode


class Teller(Protocol):
    """The conductor."""

    def tell(self, event: MemberChange | EventBatch | IndexSnapshot | WorkerReport) -> None: ...

    def prefilled(self, request: str) -> Refusal | None: ...


class Front(Protocol):
    """The gateway."""

    def begun(self, attempt: Try) -> None: ...

    def first_token(self, attempt: Try) -> None: ...

    def finished(self, attempt: Try) -> None: ...

    def failed(self, attempt: Try, failure: Failure) -> None: ...

    def refused(self, attempt: Try, refusal: Refusal) -> None: ...


class Prefiller(Protocol):
    member: Member
    alive: bool

    def submit(self, attempt: Try) -> None:
        """Busy: the queue is full."""

    def cancel(self, attempt: Try, why: Failure) -> None: ...


class Decoder(Protocol):
    @property
    def member(self) -> Member: ...

    @property
    def alive(self) -> bool: ...

    def grant(self, attempt: Try) -> Landing:
        """Busy: no room now. PeerSilent: the store node is gone."""

    def prefill_begun(self, attempt: Try, landing: Landing) -> None: ...

    def prefill_done(self, attempt: Try, first: FirstToken) -> None: ...

    def landed(self, attempt: Try) -> None: ...

    def drained(self, attempt: Try, drained: Drained) -> None: ...

    def written(self, attempt: Try) -> None: ...

    def prefill_failed(self, attempt: Try, failure: Failure) -> None: ...

    def writer_gone(self, attempt: Try, failure: Failure) -> None: ...


@dataclass(slots=True)
class Site:
    cluster: SimCluster
    clock: Clock
    links: Links
    teller: Teller
    front: Front
    noise: Noise
    stores: dict[NodeId, StoreNode] = field(default_factory=dict)
    prefillers: dict[MemberId, Prefiller] = field(default_factory=dict)
    decoders: dict[MemberId, Decoder] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    token_bytes: int = 0
