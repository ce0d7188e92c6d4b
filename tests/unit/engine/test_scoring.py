"""Log-probabilities of ids that are there already: against log-softmax, whatever the pieces."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.errors import Bug, InvalidRequest
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt, PromptLogprobs, Request, SamplingParams
from moonpool.engine import prompt_scores, scoring
from moonpool.engine.prompt_scores import PromptScores, Scores
from moonpool.engine.scoring import score
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

VOCAB = 11


def logits_of(n: int, seed: int) -> torch.Tensor:
    return torch.randn((n, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), width=st.integers(0, 5), seed=st.integers(0, 1 << 30), piece=st.integers(1, 40))
def test_scores_equal_a_plain_log_softmax(n: int, width: int, seed: int, piece: int) -> None:
    ids = random.Random(seed).choices(range(VOCAB), k=n)
    logits = logits_of(n, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "PIECE_VALUES", piece)
        got = score(logits, ids, width)
    for row, token in enumerate(ids):
        plain = [value - math.log(sum(map(math.exp, logits[row].tolist()))) for value in logits[row].tolist()]
        best = sorted(range(VOCAB), key=lambda t: -plain[t])
        assert got.logprobs[row] == pytest.approx(plain[token], abs=1e-4)
        assert best[got.ranks[row] - 1] == token
        assert got.top_tokens[row].tolist() == best[:width]
        assert got.top_logprobs[row].tolist() == pytest.approx([plain[t] for t in best[:width]], abs=1e-4)


def test_logits_that_are_not_finite_are_a_bug() -> None:
    with pytest.raises(Bug, match="not finite"):
        score(torch.tensor([[0.0, math.nan]]), [0], 1)


def filled(tokens: int, width: int, cuts: Sequence[int]) -> PromptScores:
    scores, ids = PromptScores(tokens, width), [i % VOCAB for i in range(tokens)]
    logits = logits_of(tokens, 3)
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        wanted = scores.wanted(start, end)
        if wanted:
            scores.put(start, score(logits[start : start + wanted], ids[start + 1 : start + 1 + wanted], width))
    return scores


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    values=st.integers(1, 60),
)
def test_chunks_and_parts_of_any_size_tell_the_same(tokens: int, width: int, cuts: list[int], values: int) -> None:
    whole = list(filled(tokens, width, []).parts())
    chunked = filled(tokens, width, sorted(cut for cut in cuts if cut <= tokens))
    assert chunked.complete and chunked.done == tokens - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_scores, "PART_VALUES", values)
        parts = list(chunked.parts())
    assert sum((part.logprobs for part in parts), ()) == sum((part.logprobs for part in whole), ())
    assert sum((part.top_tokens for part in parts), ()) == sum((part.top_tokens for part in whole), ())
    at = 1
    for part in parts:
        assert part.first == at
        assert len(part.logprobs) * (width + 1) <= max(values, width + 1)
        at += len(part.logprobs)
    assert at == max(tokens, 1)


def test_a_long_prompt_with_many_alternatives_travels_in_small_messages() -> None:
    tokens, width = 8_192, 20
    scores = PromptScores(tokens, width)
    rng = np.random.default_rng(1)
    scores.put(
        0,
        Scores(
            -rng.random(tokens - 1, np.float32),
            rng.integers(1, 49_152, tokens - 1),
            rng.integers(0, 49_152, (tokens - 1, width)),
            -rng.random((tokens - 1, width), np.float32),
        ),
    )
    sent = [to_wire(part, pb.types.PromptLogprobs()) for part in scores.parts()]
    assert max(message.ByteSize() for message in sent) < 512 << 10
    assert [from_wire(message, PromptLogprobs) for message in sent] == list(scores.parts())


def test_what_was_told_before_a_preemption_is_kept_and_a_hole_is_a_bug() -> None:
    scores = filled(20, 1, [])
    known = list(scores.parts())
    scores.put(0, score(logits_of(20, 3)[:5], [i % VOCAB for i in range(1, 6)], 1))
    assert list(scores.parts()) == known
    with pytest.raises(Bug, match="known up to 0"):
        PromptScores(20, 1).put(4, score(logits_of(2, 3), [1, 2], 1))


def test_only_an_attempt_without_ids_wants_its_prompt_scored() -> None:
    request = Request(RequestId("r"), (1, 2, 3), SamplingParams(4, prompt_logprobs=2), bytes(16), ())
    assert PromptScores.of(Attempt(request, 1)) is not None
    assert PromptScores.of(Attempt(request, 2, (5,))) is None
    assert PromptScores.of(Attempt(Request(RequestId("r"), (1,), SamplingParams(4), bytes(16), ()), 1)) is None


def test_parts_whose_lists_do_not_agree_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="of width 2"):
        PromptLogprobs(1, 2, (0.0,), (1,), (1,), (0.0,))
