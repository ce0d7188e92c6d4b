"""Greedy output ids of the real model in fp32 equal ``transformers.generate``. Every page is NaN until it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_runner import Reference, Runner, Transcript, assert_same

from moonpool.engine.engine import Engine

pytestmark = pytest.mark.model

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500)
OUTPUTS = 8


@pytest.fixture
def engine(engine_fp32: Engine) -> Iterator[Engine]:
    yield engine_fp32
    engine_fp32.pages.clear_cached()
    assert engine_fp32.pages.free == engine_fp32.pages.total


def _check(got: list[Transcript], prompts: list[list[int]], reference: Reference, what: str) -> None:
    ties = [
        assert_same(one, reference.generate(prompt, OUTPUTS), f"{what}, prompt of {len(prompt)}")
        for one, prompt in zip(got, prompts, strict=True)
    ]
    assert sum(ties) <= 1


def test_alone(engine: Engine, reference: Reference) -> None:
    prompts = [reference.prompt(n) for n in LENGTHS]
    got = [Runner(engine).run([prompt], OUTPUTS)[0] for prompt in prompts]
    _check(got, prompts, reference, "alone")


def test_a_long_prompt_in_chunks_of_512(engine: Engine, reference: Reference) -> None:
    prompt = reference.prompt(1100)
    _check(Runner(engine).run([prompt], OUTPUTS, chunk=lambda start: 512), [prompt], reference, "512")


def test_in_a_batch_of_sixteen(engine: Engine, reference: Reference) -> None:
    prompts = [reference.prompt(n) for n in LENGTHS] * 2
    _check(Runner(engine).run(prompts, OUTPUTS), prompts, reference, "batch")


def test_prompts_in_chunks_off_the_block_border_mixed_with_decode_steps(engine: Engine, reference: Reference) -> None:
    prompts = [reference.prompt(n) for n in LENGTHS]
    _check(Runner(engine).run(prompts, OUTPUTS, chunk=lambda start: 63), prompts, reference, "chunks of 63")


def test_with_the_prefix_reused(engine: Engine, reference: Reference) -> None:
    prompts = [reference.prompt(n) for n in LENGTHS]
    runner = Runner(engine, reuse=True)
    for cached in (False, True, True):
        got = runner.run(prompts, OUTPUTS)
        _check(got, prompts, reference, f"reuse {cached}")
        assert [one.cached for one in got] == [min(n // 64 * 64, n - 1) if cached else 0 for n in LENGTHS]
