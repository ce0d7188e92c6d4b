"""Records of what a conductor heard and answered, and what another policy would have chosen over them."""

from __future__ import annotations

import pytest
from support.cluster_of_members import BLOCK, LAYOUT, keys, prefill_seconds

from moonpool.core.errors import Reason
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import LiveAttempt, Liveness, Member, MemberChange, PrefillTiming, WorkerReport
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Bound
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.counterfactual import counterfactual
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.recording import Answered, Recording, Said, answered

LIFE = Incarnation(1)
NAMES = ("prefill-0", "prefill-1")


class Told:
    """A conductor whose every message is recorded, as its process does it."""

    def __init__(self, policy: str, limit: int = 10_000, keys: int = 100_000) -> None:
        self.conductor = Conductor(policy=make_policy(policy))
        self.recording = Recording(limit, keys)
        self.now = 10.0
        for name, role, node in (
            ("store-a", Role.STORE, "a"),
            ("store-b", Role.STORE, "b"),
            ("prefill-0", Role.PREFILL, "a"),
            ("prefill-1", Role.PREFILL, "b"),
            ("decode-0", Role.DECODE, "b"),
        ):
            member = Member(MemberId(name), role, NodeId(node), LIFE, f"{name}:1", 1, layout=LAYOUT)
            self.hear(MemberChange(member, Liveness.LIVE))
        for name in NAMES:
            self.report(name)

    def hear(self, said: Said) -> None:
        self.now += 0.01
        self.recording.add(self.now, said)
        if isinstance(said, Finished):
            actions = self.conductor.finished(said, self.now)
        else:
            assert not isinstance(said, PlaceRequest | Answered)
            actions = self.conductor.observe(said, self.now)
        for action in actions:
            if isinstance(action, Bound):
                self.recording.add(self.now, answered(action.request, action.attempt, action.answer))

    def report(self, name: str, *attempts: LiveAttempt) -> None:
        timings = tuple(PrefillTiming(n, 0, prefill_seconds(n)) for n in (50, 100, 200, 400))
        self.hear(WorkerReport(MemberId(name), LIFE, attempts, 100, 100, timings))

    def store(self, node: str, number: int, what: tuple[bytes, ...]) -> None:
        event = BlockEvent(BlockChange.STORED, Tier.G2, what)
        self.hear(EventBatch(node, LIFE, number, (event,)))

    def place(self, name: str, what: tuple[bytes, ...] = (), tokens: int = 200) -> Placement | Refusal | Later:
        self.now += 0.01
        request = PlaceRequest(name, 1, what, tokens, 8)
        self.recording.add(self.now, request)
        answer = self.conductor.place(request, self.now)
        if not isinstance(answer, Later):
            self.recording.add(self.now, answered(name, 1, answer))
        return answer


def test_the_same_policy_decides_the_same_and_gains_nothing() -> None:
    told = Told("pooled_min_ttft")
    prompt = keys(1, 10)
    told.store("a", 1, prompt)
    for i in range(6):
        placed = told.place(f"r{i}", prompt, 10 * BLOCK + 5)
        assert isinstance(placed, Placement)
        told.hear(Finished(f"r{i}", 1, placed.booking, 100.0 + i, 10.0, 8, 64))
    figures = counterfactual(told.recording.entries(), make_policy("pooled_min_ttft")).figures()
    assert (figures["decisions"], figures["compared"], figures["differ"], figures["index_resets"]) == (6, 6, 0, 0)
    assert figures["predicted_gain_ms"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0}
    assert figures["actual_ttft_ms"]["p50"] == pytest.approx(102.5)


def test_a_policy_that_heeds_no_cache_is_predicted_to_lose_by_it() -> None:
    told = Told("pooled_min_ttft")
    prompt = keys(1, 20)
    told.store("a", 1, prompt)
    for i in range(4):
        placed = told.place(f"r{i}", prompt, 20 * BLOCK + 5)
        assert isinstance(placed, Placement)
        assert placed.prefill.id == "prefill-0" or i > 0
        told.hear(Finished(f"r{i}", 1, placed.booking, 50.0))
        for name in NAMES:
            told.report(name)
    found = counterfactual(told.recording.entries(), make_policy("round_robin"))
    differing = [one for one in found.compared if one.differs]
    assert differing
    assert all((one.gain_s or 0.0) <= 0.0 for one in differing)
    assert found.figures()["largest_differences"][0]["recorded"]["prefill"] in NAMES


def test_time_waited_in_the_queue_counts_on_both_sides() -> None:
    told = Told("moonpool")
    for name in NAMES:
        told.report(name, LiveAttempt(f"busy-{name}", 1, 50_000, 50_000))
    assert isinstance(told.place("waits"), Later)
    told.now += 2.0
    told.report("prefill-1")
    (one,) = counterfactual(told.recording.entries(), make_policy("moonpool")).compared
    assert one.waited_s == pytest.approx(2.01, abs=0.02)
    assert not one.differs
    assert one.gain_s == pytest.approx(0.0)
    assert (one.recorded_ttft_s or 0.0) > 2.0


def test_refusals_are_counted_and_not_compared() -> None:
    told = Told("pooled_min_ttft")
    told.now += 0.01
    told.recording.add(told.now, PlaceRequest("gone", 1, (), 100, 8))
    told.recording.add(told.now, answered("gone", 1, Refusal(Reason.OVERLOADED, "full", 1.0)))
    figures = counterfactual(told.recording.entries(), make_policy("random")).figures()
    assert (figures["decisions"], figures["refused"], figures["compared"], figures["differ"]) == (1, 1, 0, 0)
    assert figures["largest_differences"] == []


def test_a_record_stays_within_its_bounds_and_keeps_who_is_there() -> None:
    told = Told("pooled_min_ttft", limit=12)
    for number in range(1, 30):
        told.store("a", number, keys(number, 2))
    assert len(told.recording) == 12
    assert told.recording.cut
    entries = told.recording.entries()
    members = {e.said.member.id for e in entries if isinstance(e.said, MemberChange)}
    assert members == {"store-a", "store-b", *NAMES, "decode-0"}
    placed = told.place("after", keys(29, 2), 2 * BLOCK + 1)
    assert isinstance(placed, Placement)
    found = counterfactual(told.recording.entries(), make_policy("pooled_min_ttft"))
    assert found.resets == 1, "what was stored before the cut is not known"
    assert found.compared[0].recorded is not None
    assert {e.said.member.id for e in told.recording.entries(last=3) if isinstance(e.said, MemberChange)} == members


def test_block_names_bound_a_record_too() -> None:
    told = Told("pooled_min_ttft", keys=100)
    for number in range(1, 20):
        told.store("a", number, keys(number, 20))
    assert sum(isinstance(e.said, EventBatch) for e in told.recording.entries()) == 5
