"""Flows between nodes: shares of NICs, caps, cuts; against a fluid model that moves in tiny steps."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.sim.clock import Clock
from moonpool.sim.cluster import Link
from moonpool.sim.links import Links

RATE = 100.0  # bytes per second


def links(**values: float) -> tuple[Clock, Links]:
    clock = Clock()
    return clock, Links(clock, Link(bytes_per_s=RATE, **values))


class Ends:
    def __init__(self, clock: Clock) -> None:
        self.at: dict[str, tuple[float, bool]] = {}
        self._clock = clock

    def of(self, name: str):  # type: ignore[no-untyped-def]
        return lambda ok: self.at.__setitem__(name, (self._clock.now, ok))


def test_one_flow_has_the_link_for_itself_and_waits_for_its_latency() -> None:
    clock, net = links(latency_s=0.25)
    ends = Ends(clock)
    net.send("a", "b", 200.0, ends.of("x"))
    clock.run()
    assert ends.at == {"x": (2.25, True)}
    assert len(net) == 0


def test_two_flows_into_one_node_share_its_nic_and_the_rest_of_the_second_goes_fast() -> None:
    clock, net = links()
    ends = Ends(clock)
    net.send("a", "c", 100.0, ends.of("short"))
    net.send("b", "c", 200.0, ends.of("long"))
    clock.run()
    assert ends.at == {"short": (pytest.approx(2.0), True), "long": (pytest.approx(3.0), True)}


def test_a_capped_flow_leaves_the_others_what_it_does_not_use() -> None:
    clock, net = links()
    ends = Ends(clock)
    net.send("a", "c", 50.0, ends.of("slow"), cap=10.0)
    net.send("b", "c", 180.0, ends.of("fast"))
    clock.run()
    assert ends.at == {"fast": (pytest.approx(2.0), True), "slow": (pytest.approx(5.0), True)}


def test_loss_costs_what_is_sent_again() -> None:
    clock, net = links(loss=0.5)
    ends = Ends(clock)
    net.send("a", "b", 100.0, ends.of("x"))
    clock.run()
    assert ends.at == {"x": (pytest.approx(2.0), True)}
    assert (net.moved_bytes, net.resent_bytes) == (100.0, 100.0)


def test_a_held_flow_ends_only_after_its_last_bytes_are_released() -> None:
    clock, net = links()
    ends = Ends(clock)
    flow = net.send("a", "b", 90.0, ends.of("x"), cap=9.0, held=True)
    clock.at(10.0, lambda: net.release(flow, 10.0))
    clock.run()
    assert ends.at == {"x": (pytest.approx(10.1), True)}


def test_within_one_node_nothing_travels() -> None:
    clock, net = links(latency_s=1.0)
    ends = Ends(clock)
    net.send("a", "a", 1e9, ends.of("x"))
    held = net.send("a", "a", 1e9, ends.of("held"), held=True)
    clock.at(3.0, lambda: net.release(held, 5.0))
    clock.run()
    assert ends.at == {"x": (0.0, True), "held": (3.0, True)}


def test_a_cut_breaks_what_is_under_way_and_what_begins_until_it_is_mended() -> None:
    clock, net = links()
    ends = Ends(clock)
    net.send("a", "b", 1_000.0, ends.of("under way"))
    net.send("a", "c", 100.0, ends.of("beside"))
    clock.at(1.0, lambda: net.cut("b", "a"))
    clock.at(2.0, lambda: net.send("a", "b", 10.0, ends.of("during")))
    clock.at(3.0, lambda: net.mend("a", "b"))
    clock.at(4.0, lambda: net.send("a", "b", 100.0, ends.of("after")))
    clock.run()
    assert ends.at["under way"] == (1.0, False)
    assert ends.at["beside"] == (pytest.approx(1.5), True)
    assert ends.at["during"] == (2.0, False)
    assert ends.at["after"] == (5.0, True)


def test_a_stopped_flow_tells_nobody_and_frees_its_share() -> None:
    clock, net = links()
    ends = Ends(clock)
    flow = net.send("a", "c", 1_000.0, ends.of("stopped"))
    net.send("b", "c", 100.0, ends.of("other"))
    clock.at(1.0, lambda: net.stop(flow))
    clock.run()
    assert ends.at == {"other": (pytest.approx(1.5), True)}
    assert len(net) == 0


NODES = "abcd"
FLOWS = st.lists(
    st.tuples(
        st.sampled_from(NODES),
        st.sampled_from(NODES),
        st.integers(10, 400),
        st.integers(0, 30),
        st.sampled_from((inf, 5.0, 40.0)),
    ).filter(lambda flow: flow[0] != flow[1]),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=40)
@given(FLOWS)
def test_flows_end_when_a_fluid_model_of_tiny_steps_says(flows: list[tuple[str, str, int, int, float]]) -> None:
    clock, net = links()
    ends = Ends(clock)
    for number, (source, target, size, begin, cap) in enumerate(flows):
        done = ends.of(str(number))
        clock.at(begin / 10, lambda a=source, b=target, n=size, c=cap, d=done: net.send(a, b, n, d, cap=c) and None)  # type: ignore[misc]
    clock.run()
    expected = fluid(flows)
    assert {int(name): at for name, (at, ok) in ends.at.items() if ok} == pytest.approx(expected, rel=0.05, abs=0.1)


def fluid(flows: list[tuple[str, str, int, int, float]]) -> dict[int, float]:
    """Water-filling in equal drops, steps of 10 ms."""
    left = [float(size) for _, _, size, _, _ in flows]
    ends: dict[int, float] = {}
    step, now = 0.01, 0.0
    while len(ends) < len(flows):
        active = [i for i, flow in enumerate(flows) if flow[3] / 10 <= now + 1e-9 and i not in ends]
        rates = dict.fromkeys(active, 0.0)
        growing = set(active)
        while growing:
            for i in sorted(growing):
                source, target, _, _, cap = flows[i]
                sent = sum(rates[j] for j in active if flows[j][0] == source)
                got = sum(rates[j] for j in active if flows[j][1] == target)
                if rates[i] + 1.0 > cap or max(sent, got) + 1.0 > RATE:
                    growing.discard(i)
                else:
                    rates[i] += 1.0
        now += step
        for i in active:
            left[i] -= rates[i] * step
            if left[i] <= 0.0:
                ends[i] = now
    return ends
