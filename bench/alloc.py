"""How fast a store node's pool gives out slots when it is full: reserve, seal and evict, with everything that hangs on it.

Two layouts of different block sizes share the pool, and the mix of what is asked for swings between them. Nothing is
copied: this is the book-keeping alone. Every burst is a prompt's new blocks; some continue a conversation, whose blocks
so far are pinned as for reading meanwhile. Events are taken after every burst.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass, field

from moonpool.core.config import GIB, MIB
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life
from moonpool.kvstore.eviction.make import make_policy
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.reservations import Answers
from moonpool.kvstore.slots import SlotMap

LAYOUTS = (
    KVLayout("a" * 32, layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"),  # 1.4 MiB a block
    KVLayout("b" * 32, layers=16, kv_heads=8, head_dim=64, dtype="bfloat16"),  # 2 MiB
)
REGION = 256 * MIB
BURST = 128  # blocks at most, at least 1
CONTINUED = 0.25  # of the bursts
TURNS = 4  # bursts of one conversation at most
SWINGS = 1  # of the mix, from 10 % of one layout to 90 % and back, over the measured part
WRITER = Life(MemberId("worker"), Incarnation(1))
SESSION = 1


def alloc(*, pool_gib: int = 128, bursts: int = 8_000, policy: str = "lru") -> dict[str, float | str]:
    """``bursts`` are measured after the pool has been filled once. ``bytes_per_key`` is traced in a run of its own."""
    run = _Run(_pool(pool_gib, policy))
    while not run.pool.held.counted["evicted"]:
        run.burst(0.5)
    run.taken.clear()
    run.filled.clear()
    gc.collect()
    gc.freeze()  # as a server does that has loaded: the collector looks at what is new
    moved = run.pool.slots.vacated
    for i in range(bursts):
        run.burst(0.5 + 0.4 * math.sin(2 * math.pi * SWINGS * i / bursts))
    gc.unfreeze()
    blocks = sum(n for n, _ in run.taken)
    seconds = sum(taken for _, taken in run.taken)
    numbers = run.pool.numbers()
    return {
        "policy": policy,
        "pool_gib": float(pool_gib),
        "blocks": float(blocks),
        "keys": numbers["blocks_findable"],
        "alloc_blocks_per_s": blocks / seconds,
        "burst_p50_us": statistics.median(taken for _, taken in run.taken) * 1e6,
        "burst_p99_us": statistics.quantiles((taken for _, taken in run.taken), n=100)[98] * 1e6,
        "utilisation": statistics.fmean(run.filled),
        "utilisation_least": min(run.filled),
        "spans_vacated": float(run.pool.slots.vacated - moved),
        "bytes_per_key": bytes_per_key(pool_gib, policy),
    }


def _pool(pool_gib: int, policy: str) -> Pool:
    pool = Pool(NodeId("n"), Incarnation(1), SlotMap([REGION] * (pool_gib * GIB // REGION)), make_policy(policy))
    for layout in LAYOUTS:
        pool.register(layout)
    return pool


@dataclass(slots=True)
class _Talk:
    """A conversation: the keys of its blocks so far."""

    layout: KVLayout
    keys: list[bytes] = field(default_factory=list)
    turns: int = 0


class _Run:
    """Keys are counted up, so that they cost nothing to make and are never met again."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.taken: list[tuple[int, float]] = []  # blocks and seconds of every burst
        self.filled: list[float] = []  # share of the pool's bytes that hold sealed blocks, after every burst
        self._draw = random.Random(1)
        self._talks: deque[_Talk] = deque(maxlen=64)
        self._keys = 0
        self._now = 0.0

    def burst(self, share: float) -> None:
        """One prompt; with probability ``share`` of the first layout."""
        layout = LAYOUTS[self._draw.random() >= share]
        n = self._draw.randint(1, BURST)
        keys = [i.to_bytes(16, "big") for i in range(self._keys, self._keys + n)]
        self._keys += n
        talk = self._talk(layout)
        begun = time.perf_counter()
        stored = self._store(talk, keys)
        self.taken.append((stored, time.perf_counter() - begun))
        talk.keys += keys[:stored]
        slots = self.pool.slots
        self.filled.append(slots.used_bytes / slots.total_bytes)

    def _talk(self, layout: KVLayout) -> _Talk:
        """A conversation that goes on, or a new one."""
        known = [talk for talk in self._talks if talk.layout is layout and talk.turns < TURNS]
        if known and self._draw.random() < CONTINUED:
            talk = self._draw.choice(known)
        else:
            talk = _Talk(layout)
            self._talks.append(talk)
        talk.turns += 1
        return talk

    def _store(self, talk: _Talk, keys: list[bytes]) -> int:
        pool, now = self.pool, self._now + 0.01
        self._now = now
        use = Use(turn=talk.turns, prompt_tokens=(len(talk.keys) + len(keys)) * talk.layout.block_tokens)
        ticket = pool.pin(SESSION, talk.keys, use, now, talk.layout.fingerprint)
        have = len(ticket.slots)
        if have < len(talk.keys):
            del talk.keys[have:]  # evicted since: it goes on from what is left
        answers = pool.reserve(SESSION, WRITER, talk.layout, keys, talk.keys[-1] if have else None, use, now)
        assert isinstance(answers, Answers)
        sealed = pool.seal(SESSION, answers.ids, now)
        if have:
            pool.unpin(SESSION, ticket.id, now)
        pool.take_events()
        return sealed


def bytes_per_key(pool_gib: int, policy: str) -> float:
    """What a full pool holds per findable block, its slots' and the policy's book-keeping included."""
    gc.collect()
    tracemalloc.start()
    try:
        run = _Run(_pool(pool_gib, policy))
        while run.pool.held.counted["evicted"] < 20_000:
            run.burst(0.5)
        keys = len(run.pool.held.index)
        run.taken, run.filled = [], []
        run._talks.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / keys
    finally:
        tracemalloc.stop()
