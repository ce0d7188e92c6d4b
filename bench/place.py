"""How long the conductor takes to decide: prefix match, index updates, whole placements with their decision records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, PrefillTiming, StepTiming, WorkerReport
from moonpool.core.placement import Finished, PlaceRequest
from moonpool.core.request import Targets
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.prefix_index import PrefixIndex

LIFE = Incarnation(1)


def place(*, nodes: int = 64, blocks: int = 24, entries: int = 1_000_000, rounds: int = 2_000) -> dict[str, float]:
    """Microseconds at the median and the 99th percentile of one call each; ``bytes_per_block`` counts the index alone."""
    match = _match(64, 512, entries, rounds)
    return {**match, **_place(nodes, blocks, rounds)}


def _keys(first: int, count: int) -> tuple[bytes, ...]:
    return tuple((first + i).to_bytes(16, "little") for i in range(count))


def _quantiles(name: str, call: Callable[[int], object], rounds: int) -> dict[str, float]:
    taken = []
    for i in range(rounds):
        begun = time.perf_counter()
        call(i)
        taken.append((time.perf_counter() - begun) * 1e6)
    return {f"{name}_us": statistics.median(taken), f"{name}_p99_us": statistics.quantiles(taken, n=100)[98]}


def _match(holders: int, blocks: int, entries: int, rounds: int) -> dict[str, float]:
    """Prompts of ``blocks`` blocks, a quarter of it held by everybody, the rest by one holder."""
    shared, own = _keys(0, blocks // 4), blocks - blocks // 4
    prompts = [_keys(blocks + i * own, own) for i in range(max(entries // own, 1))]
    index = PrefixIndex(Tier.G2)
    events: list[list[BlockEvent]] = [[BlockEvent(BlockChange.STORED, Tier.G2, shared)] for _ in range(holders)]
    for i, prompt in enumerate(prompts):
        events[i % holders].append(BlockEvent(BlockChange.STORED, Tier.G2, prompt))
    batches = [EventBatch(f"n{i}", LIFE, 1, tuple(mine)) for i, mine in enumerate(events)]
    begun = time.perf_counter()
    for batch in batches:
        index.apply(batch)
    rate = sum(len(event.keys) for mine in events for event in mine) / (time.perf_counter() - begun)
    asked = [shared + prompt for prompt in prompts]
    miss = _keys(1 << 40, blocks)
    return {
        "entries": float(len(index)),
        "updates_blocks_per_s": rate,
        "bytes_per_block": index.memory_bytes() / max(len(index), 1),
        **_quantiles("match", lambda i: index.match(asked[i % len(asked)]), rounds),
        **_quantiles("miss", lambda i: index.match(miss), rounds),
    }


def _member(role: Role, at: int) -> Member:
    layout = KVLayout("bench", 80, 8, 128, "bfloat16", block_tokens=512)
    return Member(MemberId(f"{role}-{at}"), role, NodeId(f"n{at}"), LIFE, f"10.0.0.{at}:1", 1, layout=layout)


def _cluster(nodes: int, prompts: Sequence[tuple[bytes, ...]]) -> Conductor:
    """A store node everywhere; even nodes prefill, odd ones decode. Every worker has reported; prompts lie all over."""
    conductor = Conductor()
    for at in range(nodes):
        for role in (Role.STORE, Role.DECODE if at % 2 else Role.PREFILL):
            conductor.observe(MemberChange(_member(role, at), Liveness.LIVE), 0.0)
    for at in range(nodes):
        mine = tuple(BlockEvent(BlockChange.STORED, Tier.G2, p[: 4 + at % 20]) for p in prompts[at % 7 :: 7])
        conductor.observe(EventBatch(f"n{at}", LIFE, 1, mine), 0.0)
        name = MemberId(f"{'decode' if at % 2 else 'prefill'}-{at}")
        jitter = 1 + at / nodes
        prefills = tuple(
            PrefillTiming(n, 0, jitter * (0.07 + 1.1e-4 * n + 7.4e-10 * n * n)) for n in (500, 4_000, 9_000, 30_000)
        )
        steps = tuple(
            StepTiming(b, c, jitter * (0.02 + 3e-7 * c)) for b, c in ((1, 9_000), (4, 40_000), (8, 200_000), (9, 90_000))
        )
        report = WorkerReport(name, LIFE, (), 1_000, 1_000, () if at % 2 else prefills, steps if at % 2 else ())
        conductor.observe(report, 0.0)
    return conductor


def _place(nodes: int, blocks: int, rounds: int) -> dict[str, float]:
    """About 100 requests are in flight; each carries targets, so the estimates are compared with them."""
    prompts = [_keys(i * blocks, blocks) for i in range(256)]
    conductor = _cluster(nodes, prompts)
    now = 0.0

    def once(i: int) -> None:
        nonlocal now
        now += 0.05
        prompt = prompts[i * 37 % len(prompts)]
        conductor.place(PlaceRequest(f"r{i}", 1, prompt, len(prompt) * 512 + 7, 100, Targets(60_000.0, 5_000.0)), now)

    def last(i: int) -> None:
        conductor.finished(Finished(f"r{i - 100}", 1, 0, 500.0, 50.0, 100, 0), now)

    for i in range(rounds, rounds + 200):
        once(i)
        last(i)
    taken = []
    for i in range(rounds):
        begun = time.perf_counter()
        once(i)
        taken.append((time.perf_counter() - begun) * 1e6)
        last(i)
    return {f"place_{nodes}_us": statistics.median(taken), f"place_{nodes}_p99_us": statistics.quantiles(taken, n=100)[98]}
