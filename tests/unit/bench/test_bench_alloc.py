"""The bench of allocation, in a small pool."""

from __future__ import annotations

from moonpool.bench.alloc import alloc


def test_a_small_full_pool_is_measured_with_two_layouts() -> None:
    figures = alloc(pool_gib=4, bursts=40)
    assert figures["blocks"] > 40
    assert 0.9 < float(figures["utilisation_least"]) <= float(figures["utilisation"]) <= 1.0
    assert 100 < float(figures["bytes_per_key"]) < 1_000
    assert float(figures["burst_p50_us"]) <= float(figures["burst_p99_us"])
    assert float(figures["alloc_blocks_per_s"]) > 0
