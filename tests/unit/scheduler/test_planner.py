"""The planner of roles over a conductor's board."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cluster_of_members import Cluster, split

from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import LiveAttempt, Liveness, MemberChange
from moonpool.core.placement import PlaceRequest
from moonpool.core.request import Targets
from moonpool.scheduler.actions import SwitchRole
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.planner import Planner, Proposal, Settings

QUICK = Settings(warm_s=5.0, every_s=1.0)


class House:
    """``prefills`` and ``decodes`` workers, taught, and traffic told to the planner alone."""

    def __init__(self, prefills: int, decodes: int, settings: Settings = QUICK) -> None:
        self.planner = Planner(settings)
        self.cluster = split(prefills, decodes, taught=True)
        self.switched: list[tuple[float, SwitchRole]] = []

    @property
    def now(self) -> float:
        return self.cluster.now

    @property
    def conductor(self) -> Conductor:
        return self.cluster.conductor

    def board(self):  # type: ignore[no-untyped-def]
        return self.conductor._view.board

    def traffic(self, seconds: int, *, prefill_s: float, output: int = 100, prompt: int = 1_000) -> None:
        """Each second four requests with ``prefill_s`` of work for their prompts together, and ``output`` tokens each."""
        for _ in range(seconds):
            self.cluster.now += 1.0
            request = PlaceRequest("r", 1, (), prompt, output, Targets(10_000.0, 100.0))
            for _ in range(4):
                self.planner.arrived(request, prompt, prefill_s / 4, self.now)
            self.planner.finished(output)
            for switch in self.planner.due(self.board(), self.now):
                self.switched.append((self.now, switch))

    def finish_switches(self) -> None:
        """Those begun are over: the workers are back in their new roles."""
        for _, switch in self.switched:
            name = str(switch.worker)
            if self.cluster.members[name].role is not switch.role:
                self.cluster.change(name, Liveness.GONE)
                self.cluster.join(name, switch.role, self.cluster.members[name].node)

    def propose(self) -> Proposal:
        return self.planner.propose(self.board(), self.now, patient=False)

    def split(self) -> tuple[int, int]:
        roles = [member.role for member in self.cluster.members.values()]
        return roles.count(Role.PREFILL), roles.count(Role.DECODE)


def test_prefill_workers_that_are_short_are_taken_from_decode() -> None:
    house = House(2, 6)
    house.traffic(30, prefill_s=3.0)
    assert house.switched
    assert {switch.role for _, switch in house.switched} == {Role.PREFILL}
    assert all(str(switch.worker).startswith("decode") for _, switch in house.switched)


def test_decode_workers_that_are_short_are_taken_from_prefill() -> None:
    house = House(6, 2)
    house.traffic(40, prefill_s=0.8, output=600)
    assert house.switched
    assert {switch.role for _, switch in house.switched} == {Role.DECODE}


def test_a_split_that_fits_stays() -> None:
    house = House(4, 4)
    house.traffic(120, prefill_s=1.5)
    assert not house.switched
    assert "below" in house.propose().held_back or "best" in house.propose().held_back


def test_the_wanted_split_is_reached_and_kept() -> None:
    house = House(2, 10)
    for _ in range(12):
        house.traffic(15, prefill_s=4.0)
        house.finish_switches()
    prefill, decode = house.split()
    assert prefill >= 5 and decode >= 2
    before = len(house.switched)
    house.traffic(120, prefill_s=4.0)
    assert len(house.switched) == before, "steady traffic moves nobody"


@pytest.mark.parametrize("period", [10, 20, 40])
def test_traffic_that_swings_faster_than_roles_can_does_not_make_them_flap(period: int) -> None:
    house = House(4, 4)
    for half in range(240 // period):
        busy = half % 2 == 0
        house.traffic(period, prefill_s=5.0 if busy else 0.5)
        house.finish_switches()
    turns = [a[1].role is not b[1].role for a, b in zip(house.switched, house.switched[1:], strict=False)]
    assert sum(turns) <= 2


def test_the_other_way_comes_only_after_the_dwell_time() -> None:
    house = House(2, 6)
    house.traffic(25, prefill_s=3.0)
    house.finish_switches()
    last = house.switched[-1][0]
    count = len(house.switched)
    house.traffic(200, prefill_s=0.1, output=600)
    back = [at for at, switch in house.switched[count:] if switch.role is Role.DECODE]
    assert back and back[0] - last >= house.planner.settings.dwell_s


def test_neither_kind_falls_below_its_minimum() -> None:
    house = House(2, 3, replace(QUICK, min_decode=2))
    house.traffic(120, prefill_s=50.0)
    house.finish_switches()
    house.traffic(120, prefill_s=50.0)
    assert len(house.switched) == 1


def test_workers_on_their_way_are_counted_in_their_new_role() -> None:
    house = House(2, 6)
    house.traffic(25, prefill_s=3.0)
    moved = [switch.worker for _, switch in house.switched]
    for name in moved:
        house.cluster.change(str(name), ready=False)
    proposal = house.propose()
    assert proposal.now.prefill + proposal.now.decode == 8
    assert proposal.now.prefill == 2 + len(moved)
    assert sorted(load.worker for load in proposal.loads if load.moving) == sorted(moved)
    assert not {switch.worker for switch in proposal.switches} & set(moved)


def test_the_worker_that_drains_soonest_is_taken() -> None:
    house = House(1, 4)
    for worker, context in ((0, 5_000), (1, 200), (2, 9_000), (3, 700)):
        house.cluster.report(f"decode-{worker}", [LiveAttempt("r", 1, context, 50)])
    house.traffic(30, prefill_s=1.5)
    assert house.switched[0][1] == SwitchRole(MemberId("decode-1"), Role.PREFILL)


def test_nothing_is_proposed_before_costs_and_answers_are_known() -> None:
    house = House(2, 6)
    house.cluster.now += 1.0
    assert "0 s only" in house.propose().held_back
    untaught = House(2, 6)
    untaught.cluster = split(2, 6)
    untaught.traffic(30, prefill_s=3.0)
    assert "not been measured" in untaught.propose().held_back
    assert not untaught.switched


def test_prompts_that_wait_are_a_demand_too() -> None:
    house = House(2, 6)
    house.traffic(30, prefill_s=0.9)
    assert not house.switched
    for name in ("prefill-0", "prefill-1"):
        house.cluster.report(name, [LiveAttempt(f"{name}{i}", 1, 4_000, 4_000) for i in range(12)])
    house.traffic(20, prefill_s=0.9)
    assert house.switched


def test_a_conductor_with_a_planner_switches_on_its_own_timer_and_counts_refused_requests() -> None:
    planner = Planner(QUICK)
    cluster = Cluster(Conductor(planner=planner))
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    for number in range(2):
        cluster.join(f"prefill-{number}", Role.PREFILL, "a")
    for number in range(6):
        cluster.join(f"decode-{number}", Role.DECODE, "b")
    cluster.teach("prefill-0", "prefill-1", *(f"decode-{n}" for n in range(6)))
    switched = []
    for step in range(60):
        cluster.now += 0.5
        cluster.place(f"r{step}", 2_000, ttft_ms=4_000.0, tbt_ms=100.0)
        cluster.finish(f"r{step}", ttft_ms=1.0)
        at = cluster.conductor.next_at()
        assert at is not None
        if at <= cluster.now:
            switched += cluster.conductor.due(cluster.now)
    assert [type(action) for action in switched] and {action.role for action in switched} == {Role.PREFILL}  # type: ignore[union-attr]
    told = cluster.conductor.rebalance(cluster.now)
    assert told is not None and told.forecast.requests == pytest.approx(2.0, rel=0.1)
    member = cluster.members["decode-0"]
    cluster.conductor.observe(MemberChange(member, Liveness.LIVE), cluster.now)


def test_one_that_only_proposes_never_acts() -> None:
    planner = Planner(QUICK, acts=False)
    assert planner.next_at() is None
    house = House(2, 6)
    house.planner = planner
    house.traffic(30, prefill_s=3.0)
    assert not house.switched
    assert house.propose().switches


def test_an_unknown_setting_is_refused_by_name() -> None:
    assert Settings.of({"dwell_s": 5, "min_decode": 3}) == replace(Settings(), dwell_s=5.0, min_decode=3)
    with pytest.raises(InvalidRequest, match="'dwel_s' is unknown; use some of ttft_s"):
        Settings.of({"dwel_s": 5.0})


def test_what_a_decode_worker_holds_while_prompts_wait_elsewhere_is_no_load_of_its_steps() -> None:
    """With too few prefill workers everybody's prompts wait, and the decode workers hold them all."""
    house = House(1, 4)
    for worker in range(4):
        waiting = [LiveAttempt(f"{worker}.{i}", 1, 9_000, 50) for i in range(40)]
        house.cluster.report(f"decode-{worker}", [*waiting, LiveAttempt("d", 1, 500, 50, output_tokens=20)])
    house.traffic(30, prefill_s=1.5)
    proposal = house.propose()
    assert all(load.batch == 1 for load in proposal.loads if load.role is Role.DECODE and not load.moving)
    assert {switch.role for _, switch in house.switched} == {Role.PREFILL}


def test_the_last_word_on_a_prompt_is_asked_after_workers_have_left_the_board() -> None:
    cluster = split(3, 1, taught=True)
    for name in ("prefill-0", "prefill-1"):
        cluster.report(name, [LiveAttempt(f"of {name}", 1, 4_000, 4_000)])
    assert cluster.placed("r", tbt_ms=1_000.0).prefill.id == "prefill-2"
    for name in ("prefill-1", "prefill-2"):
        cluster.change(name, ready=False)
    assert cluster.conductor.prefilled("r", cluster.now) is None
