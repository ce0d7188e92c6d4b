from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.ids import NodeId
from moonpool.core.membership import LinkTiming
from moonpool.scheduler.flows import Costs, Flow, Flows
from moonpool.scheduler.links import Links

NODES = tuple(NodeId(f"n{i}") for i in range(4))
A, B, C, D = NODES


def timing(source: NodeId, target: NodeId, size: int, seconds: float) -> LinkTiming:
    return LinkTiming(source, target, size, seconds)


def test_nothing_is_charged_while_nothing_is_known() -> None:
    assert Links().seconds(A, 1e9, NODES).tolist() == [0, 0, 0, 0]


def test_a_seed_serves_until_links_are_measured() -> None:
    links = Links(bytes_per_s=1e9, latency_s=0.01)
    assert links.seconds(A, 5e8, NODES).tolist() == pytest.approx([0, 0.51, 0.51, 0.51])
    for second in range(8):
        links.measured(timing(A, B, 10**9, 0.51), float(second))
    assert links.seconds(A, 1e9, NODES)[1:] == pytest.approx(0.51, rel=0.02)


def test_inside_one_node_nothing_moves() -> None:
    links = Links(bytes_per_s=1e9, latency_s=1.0)
    links.begin("r", A, A, 1e12, 0.0)
    assert len(links) == 0
    assert links.seconds(A, 1e9, (A, A, B)).tolist() == [0, 0, 2]


def test_sizes_may_differ_by_target() -> None:
    links = Links(bytes_per_s=1e9)
    assert links.seconds(A, np.array([1e9, 1e9, 2e9, 0.0]), NODES).tolist() == [0, 1, 2, 0]


def test_latency_and_rate_are_told_apart_by_transfers_of_different_sizes() -> None:
    links, rng = Links(), np.random.default_rng(0)
    for i in range(64):
        size = int(2 ** rng.uniform(20, 32))
        source, target = rng.choice(len(NODES), 2, replace=False)
        seconds = (0.002 + size / 5e9) * float(rng.lognormal(0, 0.05))
        links.measured(timing(NODES[source], NODES[target], size, seconds), float(i))
    assert links.latency_s == pytest.approx(0.002, rel=0.15)
    for size in (2**20, 2**30):
        assert links.seconds(A, size, NODES)[1:] == pytest.approx(0.002 + size / 5e9, rel=0.15)
    assert links.fit.sure
    assert links.fit.ratio(0.1) < 1.0 < links.fit.ratio(0.9) < 1.2


def test_a_slow_node_is_slow_as_source_only_if_that_is_what_was_measured() -> None:
    links = Links()
    for i in range(12):
        links.measured(timing(A, (B, C, D)[i % 3], 10**9, 1.0), float(i))
        links.measured(timing((B, C, D)[i % 3], A, 10**9, 0.1), float(i))
    assert links.seconds(A, 1e9, NODES)[1:] == pytest.approx(1.0)
    assert links.seconds(B, 1e9, NODES)[0] == pytest.approx(0.1)


def test_a_slow_pair_does_not_slow_its_nodes_other_partners() -> None:
    links = Links()
    for i in range(12):
        links.measured(timing(A, B, 10**9, 1.0), float(i))
        for target in (C, D):
            links.measured(timing(A, target, 10**9, 0.1), float(i))
    assert links.seconds(A, 1e9, NODES).tolist() == pytest.approx([0.0, 1.0, 0.1, 0.1])


def test_a_link_that_became_slower_is_followed() -> None:
    links = Links()
    for i in range(60):
        links.measured(timing(A, B, 10**9, 0.1 if i < 40 else 0.4), float(i))
    assert links.seconds(A, 1e9, NODES)[1] == pytest.approx(0.4)


def test_a_flow_in_flight_leaves_half_of_what_it_shares_and_nothing_once_it_is_through() -> None:
    links = Links(bytes_per_s=1e9)
    links.begin("r", A, B, 2e9, 10.0)
    links.advance(10.5)
    assert links.seconds(A, 1e9, NODES).tolist() == pytest.approx([0, 2, 2, 2])  # the way out is shared by all targets
    assert links.seconds(C, 1e9, NODES).tolist() == pytest.approx([1, 2, 0, 1])  # the way in of one
    links.advance(11.8)
    assert links.seconds(A, 1e9, NODES)[2] == pytest.approx(1.2)  # 0.2 s of it are left
    links.advance(12.5)
    assert links.seconds(A, 1e9, NODES)[2] == pytest.approx(1.0)


def test_a_flow_that_is_planned_for_later_does_not_count_yet() -> None:
    links = Links(bytes_per_s=1e9)
    links.begin("r", A, B, 2e9, 10.0)
    links.advance(9.0)
    assert links.seconds(A, 1e9, NODES)[1] == pytest.approx(1.0)


def test_what_shared_a_link_is_not_taken_for_a_slow_link() -> None:
    alone, together = Links(), Links()
    for i in range(6):
        at = 100.0 * i
        together.begin("x", A, C, 10**10, at)
        together.begin("y", A, B, 10**10, at)
        together.measured(timing(A, B, 10**10, 20.0), at + 20.0)
        together.measured(timing(A, C, 10**10, 20.0), at + 20.0)
        alone.measured(timing(A, B, 10**10, 10.0), at)
    assert together.seconds(A, 1e9, NODES)[1] == pytest.approx(alone.seconds(A, 1e9, NODES)[1], rel=0.01)


def test_a_measurement_ends_its_flow_and_so_does_the_end_of_the_request() -> None:
    links = Links(bytes_per_s=1e9)
    for name in ("x", "y", "z"):
        links.begin(name, A, B, 1e9, 0.0)
    links.measured(timing(A, B, 10**9, 1.0), 1.0)
    links.end("y")
    links.end("unknown")
    assert len(links) == 1


def test_a_node_that_is_gone_takes_its_flows_and_its_slowness_along() -> None:
    links = Links()
    for i in range(8):
        links.measured(timing(A, B, 10**9, 4.0), float(i))
        links.measured(timing(C, D, 10**9, 1.0), float(i))
        links.measured(timing(C, D, 10**9, 1.0), float(i))
    links.begin("r", A, B, 1e9, 10.0)
    links.forget(A)
    assert len(links) == 0
    assert links.seconds(A, 1e9, (D,))[0] == pytest.approx(1.0)


def test_flows_that_nobody_ends_are_forgotten() -> None:
    links = Links(bytes_per_s=1e9)
    links.begin("r", A, B, 1e9, 0.0)
    links.advance(20.0)
    assert len(links) == 1
    links.advance(100.0)
    assert len(links) == 0


def test_more_nodes_than_there_was_room_for() -> None:
    links = Links(bytes_per_s=1e9)
    names = tuple(NodeId(f"m{i}") for i in range(200))
    assert links.seconds(names[0], 1e9, names)[1:] == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(), st.integers(-5, 10**12)), max_size=20))
def test_whatever_is_reported_seconds_stay_finite(reported: list[tuple[float, int]]) -> None:
    links = Links()
    for i, (seconds, size) in enumerate(reported):
        links.measured(timing(NODES[i % 3], NODES[(i + 1) % 4], size, seconds), float(i))
    assert np.isfinite(links.seconds(A, 1e9, NODES)).all()


flows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0.1, 5.0), st.floats(0.0, 5.0)).filter(lambda f: f[0] != f[1]),
    max_size=5,
)
costs = st.builds(
    lambda out, into, pair: Costs(np.array(out), np.array(into), np.array(pair).reshape(3, 3)),
    st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    st.lists(st.floats(0.05, 1.0), min_size=9, max_size=9),
)


def in_small_steps(table: list[tuple[int, int, float, float]], until: float, costs: Costs, step: float = 2e-3) -> list[float]:
    left = [size for _, _, size, _ in table]
    for i in range(round(until / step)):
        moving = [k for k, flow in enumerate(table) if flow[3] <= i * step and left[k] > 0]
        for k in moving:
            source, target = table[k][:2]
            sharing_out = sum(table[m][0] == source for m in moving)
            sharing_in = sum(table[m][1] == target for m in moving)
            sharing_pair = sum(table[m][:2] == (source, target) for m in moving)
            pace = max(
                costs.out[source] * sharing_out, costs.into[target] * sharing_in, costs.pair[source, target] * sharing_pair
            )
            left[k] = max(0.0, left[k] - step / pace)
    return left


@settings(max_examples=40, deadline=None)
@given(flows, costs, st.floats(0.5, 6.0))
def test_flows_move_as_they_do_in_small_steps(table: list[tuple[int, int, float, float]], costs: Costs, until: float) -> None:
    moved = Flows()
    kept = [Flow(*flow) for flow in table]
    for i, flow in enumerate(kept):
        moved.begin(str(i), flow)
    moved.advance(until / 3, costs)
    moved.advance(until, costs)
    assert [flow.left for flow in kept] == pytest.approx(in_small_steps(table, until, costs), abs=0.15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e6, 5e9), max_size=6), st.floats(1e6, 5e9))
def test_a_new_flow_is_through_when_it_is_predicted_to_be(sizes: list[float], size: float) -> None:
    links = Links(bytes_per_s=1e9)
    for i, other in enumerate(sizes):
        links.begin(str(i), A, B, other, 0.0)
    links.advance(1e-9)
    predicted = float(links.seconds(A, size, (B,))[0])
    flow = Flow(0, 1, size, 0.0)
    world, kept = Flows(), Costs(np.full(2, 1e-9), np.full(2, 1e-9), np.zeros((2, 2)))
    for i, other in enumerate(sizes):
        world.begin(str(i), Flow(0, 1, other, 0.0))
    world.begin("new", flow)
    world.advance(100.0, kept)
    assert flow.done_at == pytest.approx(predicted, rel=1e-6, abs=1e-6)
