"""bfloat16 answers differ between paths only where the model itself hardly decides.

Logits of the bundled model lie around 20, where neighbouring bfloat16 numbers are 1/8 apart, and rounding in 30 layers
moves them by up to about one. The two best logits at a first difference were never further apart than 0.25.
"""

from __future__ import annotations

import pytest
from engine_runner import Reference, Runner, Transcript

from moonpool.engine.engine import Engine

pytestmark = pytest.mark.model

BOUND = 0.5
LENGTHS = (1, 40, 65, 128, 300)


def _check(got: list[Transcript], alone: list[Transcript], what: str) -> None:
    for a, b, n in zip(alone, got, LENGTHS, strict=False):
        first = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)
        if first is not None:
            print(f"{what}, prompt of {n}: output {first} differs, best logits {a.gap(first)} and {b.gap(first)} apart")
            assert min(a.gap(first), b.gap(first)) < BOUND


def test_first_differences_lie_where_two_logits_nearly_tie(engine_bf16: Engine, reference: Reference) -> None:
    prompts = [reference.prompt(n) for n in LENGTHS]
    alone = [Runner(engine_bf16).run([prompt], 16)[0] for prompt in prompts]
    _check(Runner(engine_bf16).run(prompts * 3, 16), alone, "batch of 15")
    _check(Runner(engine_bf16).run(prompts, 16, chunk=lambda start: 17), alone, "chunks of 17")
    cached = Runner(engine_bf16, reuse=True)
    cached.run(prompts, 1)
    _check(cached.run(prompts, 16), alone, "cached")
    engine_bf16.pages.clear_cached()
