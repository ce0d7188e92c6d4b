"""What a request costs as things grow: the parts run, and ratios are of the largest over the smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.local_cluster import LocalCluster
from moonpool.bench.scale import ScaleOptions, per_1k, ratios, scale
from moonpool.bench.scale_members import standing_by
from moonpool.bench.scale_parts import BLOCKS, Deciding, deciding_us, pool_us
from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.cluster.survey import members
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member


def test_a_conductor_places_every_request_and_its_index_has_what_it_was_told() -> None:
    run = Deciding(3, 5_000)
    before = run.conductor.numbers(0.0)["blocks_indexed"]
    for _ in range(20):
        assert run.request_us() > 0
    assert run.kept_waiting == 0
    assert before == 5_000
    assert run.conductor.numbers(0.0)["blocks_indexed"] == before + BLOCKS + 19 * BLOCKS // 2


@pytest.mark.parametrize(("workers", "blocks"), [(1, 100), (8, 5_000)])
def test_the_parts_of_a_request_take_time_at_every_size(workers: int, blocks: int) -> None:
    assert deciding_us(workers, blocks, 5) > 0


def test_a_full_pool_takes_prompts() -> None:
    assert pool_us(400, 5) > 0


def test_ratios_are_of_the_largest_over_the_smallest_size_that_was_measured() -> None:
    found = ratios({"workers_1_us": 100.0, "workers_4_us": 7.0, "workers_64_us": 150.0, "pool_1k_us": 3.0})
    assert found == {"workers_64_over_1": 1.5}
    assert ratios({"length_512_cpu_ms": 4.0, "length_8192_cpu_ms": 6.0}) == {"length_8192_over_512_cpu": 1.5}


def test_the_cost_of_a_token_is_that_above_the_shortest_prompt() -> None:
    found = {"length_512_cpu_ms": 5.0, "length_2560_cpu_ms": 6.0}
    assert per_1k(found, (512, 2_560)) == {"length_2560_cpu_us_per_1k": pytest.approx(500.0)}


def test_options_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds"):
        scale(ScaleOptions(rounds=0), lambda line: None)


@pytest.mark.processes
async def test_members_that_stand_by_are_in_the_list_and_out_of_it_again() -> None:
    registry = Registry(TimingConfig(silent_after_ms=20_000))
    address = await registry.start("127.0.0.1")
    link = Membership(address, TimingConfig(), lambda why, replaced: None)
    try:
        await link.join(Member(MemberId("real"), Role.BOTH, NodeId("a"), Incarnation(1), "127.0.0.1:1", 1))
        cluster = LocalCluster("http://127.0.0.1:1", address, Path("/nowhere"), 1)
        for _ in range(2):  # again under other names: a life that ended does not come back
            async with standing_by(cluster, 3):
                live = [c.member for c in await members(address) if c.liveness is Liveness.LIVE]
                assert [member.ready for member in live if member.id != "real"] == [False] * 3
            assert [c.member.id for c in await members(address) if c.liveness is Liveness.LIVE] == ["real"]
    finally:
        await link.leave()
        await registry.close()
