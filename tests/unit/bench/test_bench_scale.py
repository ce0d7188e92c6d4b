"""What a request costs as things grow: the parts run, and ratios are of the largest over the smallest."""

from __future__ import annotations

import pytest

from moonpool.bench.scale import ScaleOptions, per_1k, ratios, scale
from moonpool.bench.scale_parts import BLOCKS, Deciding, deciding_us, pool_us
from moonpool.core.errors import ConfigError


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
