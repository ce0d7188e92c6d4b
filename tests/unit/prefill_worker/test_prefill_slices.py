"""Chunks of a prefill worker: large where no answer waits, small enough to give way where some do."""

from __future__ import annotations

from math import inf

import pytest

from moonpool.prefill_worker.slices import LAYERS_A_SLICE, Slices
from moonpool.scheduler.chunk_size import UNHURRIED_S, USUAL, Work

LAYERS, MOST = 8, 4_096


def seconds(work: Work) -> float:
    return 2e-3 + 1e-4 * work.tokens + 2e-8 * work.pairs


@pytest.fixture
def slices() -> Slices:
    learned = Slices(LAYERS, MOST)
    for _ in range(8):
        for start, end in ((0, 512), (512, 1_536), (1_536, 3_584), (3_584, 7_680)):
            learned.measured(start, end, seconds(Work().with_chunk(start, end)))
    return learned


def test_where_no_answer_waits_a_chunk_is_as_large_as_half_a_second_allows(slices: Slices) -> None:
    n = slices.chunk_tokens(inf, 0)
    assert USUAL < n < MOST
    assert seconds(Work().with_chunk(0, n)) == pytest.approx(UNHURRIED_S, rel=0.1)
    assert slices.chunk_tokens(inf, 1_000_000) == USUAL


def test_a_chunk_with_a_row_of_logits_for_each_token_is_no_large_one(slices: Slices) -> None:
    assert slices.chunk_tokens(inf, 0, scored=True) == USUAL
    assert slices.chunk_tokens(0.1, 0) > USUAL == slices.chunk_tokens(0.1, 0, scored=True)
    assert Slices(LAYERS, 64).chunk_tokens(inf, 0, scored=True) == 64


def test_where_answers_wait_some_layers_of_a_chunk_fit_into_a_slice(slices: Slices) -> None:
    n = slices.chunk_tokens(0.02, 0)
    assert seconds(Work().with_chunk(0, n)) * LAYERS_A_SLICE / LAYERS == pytest.approx(0.02, rel=0.1)
