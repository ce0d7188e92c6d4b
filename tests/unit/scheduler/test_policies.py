"""What holds for every placement policy, on clusters drawn at random; and what sets each of them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_of_members import BLOCK, Cluster, keys, split

from moonpool.core.errors import InvalidRequest
from moonpool.core.events import Tier
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import LiveAttempt
from moonpool.core.placement import Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Bound
from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.draws import draw
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.make import POLICIES, make_policy
from moonpool.scheduler.policies.pairing import pair
from moonpool.scheduler.policy import Asked, Choice

ALL = sorted(POLICIES)
DOCS = Path(__file__).parents[3] / "docs" / "placement.md"


def ask(
    cluster: Cluster, request: str, tokens: int, prompt: tuple[bytes, ...] = (), exclude: Sequence[str] = ()
) -> Placement | Refusal | Later:
    asked = PlaceRequest(request, 1, prompt, tokens, 32, exclude=tuple(MemberId(name) for name in exclude))
    return cluster.conductor.place(asked, cluster.now)


def bound(cluster: Cluster) -> list[Placement | Refusal]:
    """What those who waited are answered now."""
    return [action.answer for action in cluster.conductor.due(cluster.now) if isinstance(action, Bound)]


def under(policy: str, cluster: Cluster, **numbers: float) -> Cluster:
    """A cluster like ``cluster``, nobody in it yet, placed by ``policy``."""
    cluster.conductor = Conductor(policy=make_policy(policy, numbers))
    return cluster


@dataclass(frozen=True)
class Drawn:
    """(role, busy jobs, free pages, blocks of the prompt its node has, excluded) per worker; stores at nodes a and b."""

    workers: list[tuple[Role, int, int, int, bool]]
    blocks: int
    tokens_beyond: int


WORKER = st.tuples(
    st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]),
    st.integers(0, 3),
    st.sampled_from([0, 2, 1_000]),
    st.integers(0, 12),
    st.booleans(),
)
DRAWN = st.builds(Drawn, st.lists(WORKER, min_size=1, max_size=7), st.integers(0, 12), st.integers(1, 40))


def build(policy: str, drawn: Drawn) -> tuple[Cluster, list[str]]:
    cluster = under(policy, Cluster())
    prompt = keys(1, 12)
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    excluded = []
    for i, (role, busy, pages, has, out) in enumerate(drawn.workers):
        name = f"w{i}"
        cluster.join(name, role, "ab"[i % 2])
        cluster.teach(name)
        left = 0 if role is Role.DECODE else 100
        jobs = [LiveAttempt(f"x{i}.{j}", 1, 100, 100, prompt_left=left) for j in range(busy)]
        cluster.report(name, jobs, free_pages=pages)
        if has:
            cluster.stored(name, prompt[:has], tier=Tier.G1)
            cluster.stored("ab"[i % 2], prompt[:has], store=f"store-{'ab'[i % 2]}")
        if out:
            excluded.append(name)
    return cluster, excluded


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=40, deadline=None)
@given(drawn=DRAWN)
def test_a_choice_is_usable_and_has_room_where_somebody_has(policy: str, drawn: Drawn) -> None:
    cluster, excluded = build(policy, drawn)
    tokens = drawn.blocks * BLOCK + drawn.tokens_beyond
    answer = ask(cluster, "r", tokens, keys(1, drawn.blocks), excluded)
    able = {f"w{i}": (role, pages * BLOCK >= tokens) for i, (role, _, pages, _, out) in enumerate(drawn.workers) if not out}
    kinds = {role for role, _ in able.values()}
    if Role.BOTH not in kinds and not {Role.PREFILL, Role.DECODE} <= kinds:
        assert isinstance(answer, Refusal)
        return
    if isinstance(answer, Later):
        assert make_policy(policy).late
        cluster.now += 1_000.0
        (answer,) = bound(cluster)
    assert isinstance(answer, Placement)
    prefill, decode = able[answer.prefill.id], able[answer.decode.id]
    if answer.prefill.id == answer.decode.id:
        assert prefill[0] is Role.BOTH
        assert prefill[1] or not any(roomy for role, roomy in able.values() if role is Role.BOTH)
    else:
        assert (prefill[0], decode[0]) == (Role.PREFILL, Role.DECODE)
        assert decode[1] or not any(roomy for role, roomy in able.values() if role is Role.DECODE)
    covered = [(segment.first, segment.count) for segment in answer.segments]
    assert sum(count for _, count in covered) == drawn.blocks
    assert [first for first, _ in covered] == [sum(count for _, count in covered[:i]) for i in range(len(covered))]


@pytest.mark.parametrize("policy", ALL)
def test_equal_messages_give_equal_choices(policy: str) -> None:
    def run() -> list[tuple[MemberId, MemberId]]:
        cluster = under(policy, Cluster())
        for node in "ab":
            cluster.join(f"store-{node}", Role.STORE, node)
        for i in range(4):
            cluster.join(f"prefill-{i}", Role.PREFILL, "a")
            cluster.join(f"decode-{i}", Role.DECODE, "b")
        out = []
        for i in range(20):
            answer = ask(cluster, f"r{i}", 50, keys(i % 3, 3))
            if isinstance(answer, Placement):
                out.append((answer.prefill.id, answer.decode.id))
                cluster.finish(f"r{i}")
            cluster.now += 1.0
        return out

    assert run() == run() != []


@pytest.mark.parametrize("policy", [name for name in ALL if name not in ("random", "round_robin")])
def test_short_unique_prompts_go_past_a_worker_with_long_ones(policy: str) -> None:
    cluster = under(policy, Cluster())
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    for i in range(3):
        cluster.join(f"prefill-{i}", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "b")
    cluster.teach("prefill-0", "prefill-1", "prefill-2", "decode-0")
    cluster.report("prefill-0", [LiveAttempt(f"long{i}", 1, 8_000, 8_000) for i in range(8)])
    went: Counter[str] = Counter()
    for i in range(60):
        answer = ask(cluster, f"r{i}", 40, keys(10 + i, 2))
        cluster.now += 0.2
        went.update(placed.prefill.id for placed in [answer, *bound(cluster)] if isinstance(placed, Placement))
        for worker in ("prefill-1", "prefill-2"):
            cluster.report(worker)
    assert went["prefill-0"] == 0
    assert went.total() == 60


def test_random_draws_are_even_and_depend_on_the_seed() -> None:
    counts = Counter(draw(7, number, 5) for number in range(10_000))
    assert all(1_800 < counts[i] < 2_200 for i in range(5))
    assert [draw(1, n, 1_000) for n in range(8)] != [draw(2, n, 1_000) for n in range(8)]


def test_an_unknown_policy_or_setting_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'fastest' is none of algorithm1, "):
        make_policy("fastest")
    with pytest.raises(InvalidRequest, match="algorithm1 has no 'age'; it has balancing_threshold"):
        make_policy("algorithm1", {"age": 1.0})
    with pytest.raises(InvalidRequest, match="age is nan; give 0 or more"):
        make_policy("moonpool", {"age": float("nan")})


def test_every_policy_and_number_is_described() -> None:
    text = DOCS.read_text()
    for name in ALL:
        assert f"| `{name}` |" in text
        for setting in set(signature(POLICIES[name]).parameters) - {"seed"}:
            assert f"`{setting}`" in text or name == "dynamo_cost", f"{name}: {setting}"


def test_the_policy_in_the_guide_works() -> None:
    code = DOCS.read_text().split("```python\n")[1].split("```")[0]
    names = {"Asked": Asked, "Choice": Choice, "Early": Early, "decoder_for": decoder_for, "np": np, "pair": pair}
    exec(code, names)
    cluster = split(prefills=3)
    cluster.conductor.policy = names["LongestMatch"]()  # type: ignore[operator]
    cluster.stored("prefill-1", keys(1, 3), tier=Tier.G1)
    assert cluster.placed("r", 4 * BLOCK, prompt=keys(1, 4)).prefill.id == "prefill-1"
