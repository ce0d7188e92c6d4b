"""Prefill times that a fit has not seen: Mooncake (FAST 2025), LLaMA-3-70B on nodes of 8 x A800."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from moonpool.cli.plan import read_machine
from moonpool.core.membership import PrefillTiming
from moonpool.loadgen.trace import read_trace
from moonpool.scheduler.estimates import Fit, PrefillEstimate
from moonpool.scheduler.model_shape import shape_of
from moonpool.scheduler.roofline import Roofline

CONFIG = json.loads((Path(__file__).parents[2] / "fixtures/llama-3-70b/config.json").read_text())
SEED = Roofline(shape_of(CONFIG), read_machine("a800x8")[0]).prefill()
TOKENS = (8_192, 16_384, 32_768, 65_536, 131_072)
UNCACHED_S = (1.000, 2.053, 4.483, 10.589, 27.512)  # fig. 14, nothing cached
CACHED_S = (0.135, 0.227, 0.406, 0.882, 2.328)  # and 95 %
BARS = [PrefillTiming(n, 0, s) for n, s in zip(TOKENS, UNCACHED_S, strict=True)] + [
    PrefillTiming(n, int(0.95 * n), s, loaded_tokens=int(0.95 * n)) for n, s in zip(TOKENS, CACHED_S, strict=True)
]
WITHIN = 0.08


def fitted(bars: list[PrefillTiming]) -> Fit:
    estimate = PrefillEstimate(SEED)
    for bar in bars:
        estimate.add(bar)
    return estimate.fit


@pytest.mark.parametrize("left_out", range(len(BARS)))
def test_a_bar_of_fig_14_follows_from_the_others(left_out: int) -> None:
    fit = fitted(BARS[:left_out] + BARS[left_out + 1 :])
    bar = BARS[left_out]
    n, p = bar.prompt_tokens, bar.cached_tokens
    assert fit.sure
    assert np.dot(fit.coefficients, (1, n - p, n * n - p * p, p)) == pytest.approx(bar.seconds, rel=WITHIN)


@pytest.mark.parametrize(
    ("trace", "uncached_s", "mooncake_s"),
    [("conversation_trace.jsonl.gz", 1.661, 1.062), ("synthetic_trace.jsonl.gz", 2.022, 0.733)],
)
def test_the_means_of_fig_8_follow_from_fig_14(trace: str, uncached_s: float, mooncake_s: float) -> None:
    """They are GPU seconds, in which loads are not contained; the cache is taken to keep everything."""
    path = Path(os.environ.get("MOONPOOL_TRACES", "")) / trace
    if not path.is_file():
        pytest.skip(f"MOONPOOL_TRACES names no folder with {trace}")
    seen: set[int] = set()
    jobs = []
    for row in read_trace(path).rows:
        hits = next((i for i, block in enumerate(row.hash_ids) if block not in seen), len(row.hash_ids))
        seen.update(row.hash_ids)
        jobs.append((row.input_length, min(hits * 512, row.input_length - 1)))
    n, p = np.array(jobs, np.float64).T
    a, b, c, _ = fitted(BARS).coefficients
    assert np.mean(a + b * n + c * n * n) == pytest.approx(uncached_s, rel=WITHIN)
    assert np.mean(a + b * (n - p) + c * (n * n - p * p)) == pytest.approx(mooncake_s, rel=WITHIN)
