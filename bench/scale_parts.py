"""What one request costs the conductor and a store node's pool as members and blocks become more: the parts without compute.

Everything runs in this process on the real classes; keys are counted up, and no memory is taken for blocks.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from moonpool.bench.timing import microseconds
from moonpool.core.config import MIB
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, PrefillTiming, StepTiming, WorkerReport
from moonpool.core.placement import Finished, Later, PlaceRequest
from moonpool.core.request import Targets
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life
from moonpool.kvstore.eviction.make import make_policy as make_eviction
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.reservations import Answers
from moonpool.kvstore.slots import SlotMap
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy

BLOCKS = 24  # of one prompt
_LIFE = Incarnation(1)
_LAYOUT = KVLayout("bench", 30, 3, 64, "bfloat16", block_tokens=64)
_PER_WORKER = 2  # requests in flight
_RATE_PER_WORKER = 0.5  # requests/s
_TOLD = 1 << 12  # blocks per event while the index is filled
_REGION = 256 * MIB
_CONTINUED = 8  # prompts of one conversation
_SESSION = 1
_WRITER = Life(MemberId("worker"), _LIFE)


class Deciding:
    """A conductor with ``workers`` nodes of role both, whose index knows ``blocks`` blocks, spread over all nodes."""

    def __init__(self, workers: int, blocks: int) -> None:
        self.conductor = Conductor(policy=make_policy("moonpool"), admission=make_admission("moonpool"))
        self._workers, self._numbers = workers, [1] * workers
        self._now = 0.0
        self._keys = self._request = 0
        self._last: list[bytes] = []
        self._flying: deque[tuple[str, int]] = deque()
        self.kept_waiting = 0
        for at in range(workers):
            for role in (Role.STORE, Role.BOTH):
                self.conductor.observe(MemberChange(_member(role, at), Liveness.LIVE), 0.0)
            self.conductor.observe(_report(at, taught=True), 0.0)
        for first in range(0, blocks, _TOLD):
            self._stored(first // _TOLD % workers, self._new_keys(min(_TOLD, blocks - first)))

    def request_us(self) -> float:
        """Everything a conductor does for one request: it places it, hears of its blocks and its worker, and of its end.

        Half of its blocks were seen before: those of the request before it.
        """
        known = self._last[: BLOCKS // 2] if self._request else []
        keys = [*known, *self._new_keys(BLOCKS - len(known))]
        self._last = keys
        self._now += 1.0 / (_RATE_PER_WORKER * self._workers)
        return microseconds(lambda: self._one(keys))

    def _one(self, keys: Sequence[bytes]) -> None:
        name, at = f"r{self._request}", self._request % self._workers
        self._request += 1
        asked = PlaceRequest(name, 1, tuple(keys), len(keys) * _LAYOUT.block_tokens + 7, 100, Targets())
        self.kept_waiting += isinstance(self.conductor.place(asked, self._now), Later)
        self._stored(at, keys)
        self.conductor.observe(_report(at), self._now)
        self._flying.append((name, at))
        if len(self._flying) > _PER_WORKER * self._workers:
            ended, _ = self._flying.popleft()
            self.conductor.finished(Finished(ended, 1, 0, 500.0, 50.0, 100, 0), self._now)

    def _stored(self, at: int, keys: Sequence[bytes]) -> None:
        event = BlockEvent(BlockChange.STORED, Tier.G2, tuple(keys))
        self.conductor.observe(EventBatch(f"n{at}", _LIFE, self._numbers[at], (event,)), self._now)
        self._numbers[at] += 1

    def _new_keys(self, count: int) -> list[bytes]:
        self._keys += count
        return [i.to_bytes(16, "little") for i in range(self._keys - count, self._keys)]


def deciding_us(workers: int, blocks: int, rounds: int) -> float:
    """Median over ``rounds`` requests, after a tenth of them more to warm up."""
    run = Deciding(workers, blocks)
    for _ in range(max(rounds // 10, 1)):
        run.request_us()
    return statistics.median(run.request_us() for _ in range(rounds))


def pool_us(blocks: int, rounds: int) -> float:
    """Median cost of one prompt of ``BLOCKS`` blocks to a full pool of ``blocks``: looked up and pinned as far as it is there
    (half of it), reserved, sealed, unpinned, its events taken, and as many old blocks evicted.
    """
    regions = max(blocks * _LAYOUT.slot_bytes // _REGION, 1)
    pool = Pool(NodeId("n"), _LIFE, SlotMap([_REGION] * regions), make_eviction("lru"))
    pool.register(_LAYOUT)
    filling = _Filling(pool)
    while pool.held.counted["evicted"] < 4 * BLOCKS:
        filling.prompt()
    for _ in range(max(rounds // 10, 1)):
        filling.prompt()
    return statistics.median(microseconds(filling.prompt) for _ in range(rounds))


class _Filling:
    """Conversations of a few prompts, one after the other."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._now = pool, 0.0
        self._prompts = self._keys = 0
        self._so_far: list[bytes] = []

    def prompt(self) -> None:
        pool, self._now = self._pool, self._now + 0.01
        if self._prompts % _CONTINUED == 0:
            self._so_far = []
        self._prompts += 1
        known = self._so_far[: BLOCKS // 2]
        new = [i.to_bytes(16, "big") for i in range(self._keys, self._keys + BLOCKS - len(known))]
        self._keys += len(new)
        use = Use(prompt_tokens=BLOCKS * _LAYOUT.block_tokens)
        ticket = pool.pin(_SESSION, known, use, self._now, _LAYOUT.fingerprint)
        answers = pool.reserve(_SESSION, _WRITER, _LAYOUT, new, known[-1] if known else None, use, self._now)
        if isinstance(answers, Answers):
            pool.seal(_SESSION, answers.ids, self._now)
        if ticket.slots:
            pool.unpin(_SESSION, ticket.id, self._now)
        pool.take_events()
        self._so_far = [*known, *new]


def _member(role: Role, at: int) -> Member:
    return Member(MemberId(f"{role}-{at}"), role, NodeId(f"n{at}"), _LIFE, f"10.0.0.{at}:1", 1, layout=_LAYOUT)


def _report(at: int, *, taught: bool = False) -> WorkerReport:
    """``taught``: with measurements from which its times can be predicted."""
    prefills = tuple(PrefillTiming(n, 0, 0.07 + 1.1e-4 * n + 7.4e-10 * n * n) for n in (500, 4_000, 9_000, 30_000))
    steps = tuple(StepTiming(b, c, 0.02 + 3e-7 * c) for b, c in ((1, 9_000), (4, 40_000), (8, 200_000), (9, 90_000)))
    one = ((PrefillTiming(1_536, 768, 0.2),), (StepTiming(2, 3_000, 0.021),))
    prefills, steps = (prefills, steps) if taught else one
    return WorkerReport(MemberId(f"{Role.BOTH}-{at}"), _LIFE, (), 1_000, 1_000, prefills, steps)
