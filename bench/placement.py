"""How long the conductor takes to decide: whole placements with their decision records.

    place_64_us, place_512_us            prompts of 24 blocks, parts of which are held all over
    place_64_kept_waiting, ...           share of requests that were put into the queue of late binding

Times are medians; each has its 99th percentile beside it (``_p99_us``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.bench.timing import microseconds, quantiles
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange, PrefillTiming, StepTiming, WorkerReport
from moonpool.core.placement import Finished, Later, PlaceRequest
from moonpool.core.request import Targets
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy

LIFE = Incarnation(1)
NODES = (64, 512)


def placement(
    *,
    nodes: Sequence[int] = NODES,
    blocks: int = 24,
    rounds: int = 2_000,
    policy: str = "moonpool",
    admission: str = "moonpool",
) -> dict[str, Any]:
    """Microseconds at the median and the 99th percentile of one ``Conductor.place``, at so many nodes.

    InvalidRequest where there is no such policy or admission.
    """
    out: dict[str, Any] = {"policy": policy, "admission": admission}
    for n in nodes:
        out |= _place(n, blocks, rounds, policy, admission)
    return out


def _keys(first: int, count: int) -> tuple[bytes, ...]:
    return tuple((first + i).to_bytes(16, "little") for i in range(count))


def _member(role: Role, at: int) -> Member:
    layout = KVLayout("bench", 80, 8, 128, "bfloat16", block_tokens=512)
    return Member(MemberId(f"{role}-{at}"), role, NodeId(f"n{at}"), LIFE, f"10.0.0.{at}:1", 1, layout=layout)


def _cluster(nodes: int, prompts: Sequence[tuple[bytes, ...]], policy: str, admission: str) -> Conductor:
    """A store node everywhere; even nodes prefill, odd ones decode. Every worker has reported; prompts lie all over."""
    conductor = Conductor(policy=make_policy(policy), admission=make_admission(admission))
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


def _place(nodes: int, blocks: int, rounds: int, policy: str, admission: str) -> dict[str, float]:
    """About 100 requests are in flight; each carries targets, so the estimates are compared with them."""
    prompts = [_keys(i * blocks, blocks) for i in range(256)]
    conductor = _cluster(nodes, prompts, policy, admission)
    later, now = 0, 0.0

    def once(i: int) -> None:
        nonlocal later, now
        now += 6.4 / nodes
        prompt = prompts[i * 37 % len(prompts)]
        asked = PlaceRequest(f"r{i}", 1, prompt, len(prompt) * 512 + 7, 100, Targets(60_000.0, 5_000.0))
        later += isinstance(conductor.place(asked, now), Later)

    def last(i: int) -> None:
        conductor.finished(Finished(f"r{i - 100}", 1, 0, 500.0, 50.0, 100, 0), now)

    for i in range(rounds, rounds + 200):
        once(i)
        last(i)
    later = 0
    taken = []
    for i in range(rounds):
        taken.append(microseconds(lambda i=i: once(i)))  # type: ignore[misc]
        last(i)
    return {**quantiles(f"place_{nodes}", taken), f"place_{nodes}_kept_waiting": later / rounds}
