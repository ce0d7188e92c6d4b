from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster_of_members import Cluster

from moonpool.cli.plan import PROFILES, read_machine
from moonpool.core.ids import Role
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.estimates import PrefillEstimate, StepEstimate
from moonpool.scheduler.model_shape import shape_of
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.roofline import Roofline

CONFIG = json.loads((Path(__file__).parents[2] / "fixtures/llama-3-70b/config.json").read_text())
LLAMA_70B = shape_of(CONFIG)
A800, H800 = (Roofline(LLAMA_70B, read_machine(name)[0]) for name in ("a800x8", "h800x8"))


@pytest.mark.parametrize(("line", "rate"), [(A800, 5.9e9), (H800, 18.6e9)], ids=["a800x8", "h800x8"])
def test_break_even_rates_at_peak_are_those_of_equation_2(line: Roofline, rate: float) -> None:
    assert line.break_even_at_peak(8_192) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("tokens", "rate"), [(8_192, 2.8e9), (32_768, 2.4e9), (131_072, 1.6e9)])
def test_break_even_rates_at_measured_efficiency(tokens: int, rate: float) -> None:
    assert A800.break_even(tokens) == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(8_192, 1.0), (16_384, 2.053), (32_768, 4.483), (65_536, 10.589), (131_072, 27.512)]
)
def test_prefill_takes_what_was_measured(tokens: int, seconds: float) -> None:
    assert A800.prefill_s(tokens) == pytest.approx(seconds, rel=0.05)


def test_a_token_takes_what_was_measured() -> None:
    assert A800.step_s(1, 0) == pytest.approx(0.0263, rel=0.02)
    fp8 = shape_of(CONFIG | {"quantization_config": {"quant_method": "fp8"}}, kv_dtype="fp8")
    h200 = Roofline(fp8, read_machine("h200")[0])
    assert h200.step_s(1, 0) == pytest.approx(0.0203, rel=0.05)
    assert h200.device_tokens == pytest.approx(348_304, rel=0.03)


def test_what_fits() -> None:
    assert A800.dram_tokens == pytest.approx(3e6, rel=0.03)
    assert Roofline(LLAMA_70B, read_machine("h200")[0]).device_tokens == 0


def test_chunks_cost_an_overhead_each() -> None:
    whole, chunked = A800.prefill_s(8_192), A800.prefill_s(8_192, chunk_tokens=512)
    assert chunked - whole == pytest.approx(16 * 80 * A800.machine.layer_overhead_s)


def test_large_batches_are_bound_by_arithmetic() -> None:
    small, large = A800.step_s(1, 0), A800.step_s(4_096, 0)
    assert large > 2 * small
    assert large == pytest.approx(4_096 * LLAMA_70B.linear_flops / (A800.machine.peak * 0.5) + 80 * 185e-6)


def test_seeds_predict_as_the_roofline_does_and_are_not_sure() -> None:
    prefill, step = PrefillEstimate(A800.prefill()).fit, StepEstimate(A800.step()).fit
    a, b, c, d = prefill.coefficients
    n, p = 16_000, 4_000
    assert a + b * (n - p) + c * (n * n - p * p) + d * p == pytest.approx(A800.prefill_s(n, p))
    assert step.coefficients[0] == pytest.approx(A800.step_s(1, 0))
    assert not (prefill.sure or step.sure)
    assert prefill.ratio(0.95) > 3.0 and prefill.ratio(0.05) < 0.3


def test_a_cold_conductor_ranks_by_the_roofline_and_refuses_nothing_for_it() -> None:
    cluster = Cluster(Conductor(policy=make_policy("pooled_min_ttft"), seeds=A800.seeds()))
    for node in ("a", "b"):
        cluster.join(f"store-{node}", Role.STORE, node)
        cluster.join(f"prefill-{node}", Role.PREFILL, node)
    cluster.join("decode-0", Role.DECODE, "a")
    first = cluster.placed("long", 100_000, ttft_ms=1.0, tbt_ms=0.1)
    assert first.predicted_ttft_ms == first.predicted_tbt_ms == 0.0
    board = cluster.conductor._view.board
    assert board.busy_until.max() - cluster.now == pytest.approx(A800.prefill_s(100_000), rel=0.01)
    assert cluster.placed("short", 1_000).prefill.id != first.prefill.id


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_is_complete_and_says_where_its_numbers_come_from(profile: Path) -> None:
    machine, sources = read_machine(profile.stem)
    assert replace(machine) == machine
    assert machine.peak > 0 and machine.reads > 0
    given = tomllib.loads(profile.read_text()).keys() - {"name", "devices", "sources"}
    assert given - sources.keys() <= {"memory_bytes"}
    assert all(sources.values())
