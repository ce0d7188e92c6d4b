"""Drawing ids: against a dumb reference, and as a pure function of what it is given."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.errors import Bug
from moonpool.core.request import FinishReason, LogitBias, Sampled, SamplingParams
from moonpool.engine import sampler
from moonpool.engine.sampler import SamplerState, finish_reason, sample, uniform

VOCAB = 12
EOS = frozenset({1})


def state(outputs: list[int] | None = None, prompt: list[int] | None = None, **values: object) -> SamplerState:
    return SamplerState(SamplingParams(**{"max_tokens": 100, **values}), prompt or [], outputs or [])  # type: ignore[arg-type]


def one(logits: list[float], s: SamplerState) -> Sampled:
    return sample(torch.tensor([logits]), [s], EOS)[0]


def dumb_token(logits: list[float], s: SamplerState) -> tuple[int, float]:
    """The id, and how far the drawn number is from a border between two ids (or two logits from a tie)."""
    p, adjusted = s.params, list(logits)
    for one in p.logit_bias:
        adjusted[one.token] += one.bias
    if len(s.outputs) < p.min_tokens:
        for token in {*p.stop_token_ids, *(() if p.ignore_eos else EOS)}:
            adjusted[token] = -math.inf
    for token in {*s.prompt, *s.outputs}:
        adjusted[token] = (
            adjusted[token] / p.repetition_penalty if adjusted[token] > 0 else adjusted[token] * p.repetition_penalty
        )
    for token in set(s.outputs):
        adjusted[token] -= p.frequency_penalty * s.outputs.count(token) + p.presence_penalty
    order = sorted(range(VOCAB), key=lambda t: (-adjusted[t], t))
    if p.temperature == 0:
        return order[0], adjusted[order[0]] - adjusted[order[1]]
    peak, least = adjusted[order[0]], math.log(p.min_p) * p.temperature if p.min_p else -math.inf
    likely = [t for t in order if adjusted[t] >= peak + least]
    edges = [abs(adjusted[t] - peak - least) for t in order if p.min_p and adjusted[t] > -math.inf]
    kept = likely[: p.top_k] if p.top_k else likely
    if not 0 < p.top_k < VOCAB and p.top_p == 1:
        kept = sorted(likely)
    margin = adjusted[order[len(kept) - 1]] - adjusted[order[len(kept)]] if len(kept) < VOCAB else math.inf
    margin = min([margin, *edges])
    penalised = {*s.prompt, *s.outputs, *(one.token for one in p.logit_bias)}
    for a, b in itertools.pairwise(order):  # equal but for rounding: either order is right
        if a in penalised or b in penalised:
            margin = min(margin, adjusted[a] - adjusted[b])
    weights = [math.exp((adjusted[t] - adjusted[order[0]]) / p.temperature) for t in kept]
    mass = np.cumsum(weights) / sum(weights)
    n = next((i + 1 for i, m in enumerate(mass) if m >= p.top_p), len(kept))
    margin = min([margin, *(abs(m - p.top_p) for m in mass)]) if p.top_p < 1 else margin
    u = uniform(p.seed, len(s.outputs)) * mass[n - 1]
    return kept[next(i for i, m in enumerate(mass) if m > u)], min([margin, *(abs(m - u) for m in mass[: n - 1])])


tokens = st.integers(0, VOCAB - 1)
biases = st.sampled_from([-100.0, -0.7, 0.4, 100.0])


@st.composite
def states(draw: st.DrawFn) -> SamplerState:
    return state(
        draw(st.lists(tokens, max_size=6)),
        draw(st.lists(tokens, max_size=6)),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.integers(0, VOCAB + 2)),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        seed=draw(st.integers(-(2**63), 2**64)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 4)),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.6, 1.0])),
        logit_bias=tuple(LogitBias(t, b) for t, b in draw(st.dictionaries(tokens, biases, max_size=4)).items()),
    )


rows = st.lists(st.integers(-15, 15).map(lambda n: n / 10), min_size=VOCAB, max_size=VOCAB)  # close: penalties matter


@given(rows, states())
@settings(max_examples=400, deadline=None)
def test_one_draw_equals_the_dumb_reference(logits: list[float], s: SamplerState) -> None:
    want, margin = dumb_token(logits, s)
    if margin > 1e-5 or s.params.temperature == 0:
        got = one(logits, s).token
        assert got == want or margin < 1e-5


@given(st.lists(st.tuples(rows, states()), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_batch_draws_what_each_row_draws_alone_and_changes_no_logits(batch: list[tuple[list[float], SamplerState]]) -> None:
    logits = torch.tensor([row for row, _ in batch])
    before = logits.clone()
    together = sample(logits, [s for _, s in batch], EOS)
    assert together == [one(row, s) for row, s in batch]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_keeps_the_same_ids_whether_few_or_thousands_are_needed(top_p: float) -> None:
    """Flat and peaked distributions over a large vocabulary: the short way and the full sort agree with a plain sum."""
    draw = torch.Generator().manual_seed(1)
    for scale in (0.01, 1.0, 6.0):
        logits = torch.randn(6_000, generator=draw) * scale
        order = logits.double().sort(descending=True, stable=True).indices
        mass = torch.softmax(logits.double(), -1)[order].cumsum(0)
        allowed = set(order[: int((mass < top_p).sum()) + 1].tolist())
        drawn = {sample(logits[None], [state(top_p=top_p, seed=seed)], EOS)[0].token for seed in range(80)}
        assert drawn <= allowed


def test_an_id_without_weight_is_never_drawn_even_at_the_ends() -> None:
    mass = torch.tensor([0.0, 0.25, 0.25, 1.0, 1.0], dtype=torch.float64)
    assert [sampler._at_quantile(mass, u) for u in (0.0, 0.2, 0.25, 0.9, 1 - 2**-53)] == [1, 1, 3, 3, 3]


def test_a_bias_rules_an_id_out_or_in_before_anything_else() -> None:
    logits = [5.0, 0.0, *[1.0] * (VOCAB - 2)]
    assert one(logits, state(temperature=0, logit_bias=(LogitBias(0, -100.0), LogitBias(7, 0.5)))).token == 7
    assert {one(logits, state(logit_bias=(LogitBias(3, 100.0),), seed=seed)).token for seed in range(40)} == {3}
    held_back = state(temperature=0, logit_bias=(LogitBias(1, 100.0),), min_tokens=1)
    assert one(logits, held_back).token == 0, "an end of sequence waits whatever speaks for it"
    unbiased = one(logits, state(temperature=0, logprobs=1))
    assert one(logits, state(temperature=0, logprobs=1, logit_bias=(LogitBias(7, 3.9),))) == unbiased


def test_ids_less_likely_than_a_share_of_the_likeliest_are_not_drawn() -> None:
    logits = torch.log(torch.tensor([0.5, 0.26, 0.14, 0.1])).tolist()

    def drawn(**values: object) -> set[int]:
        return {sample(torch.tensor([logits]), [state(seed=seed, **values)], EOS)[0].token for seed in range(200)}

    assert drawn(min_p=0.25) == {0, 1, 2}
    assert drawn(min_p=0.5) == {0, 1}
    assert drawn(min_p=1.0) == {0}
    assert drawn(min_p=0.25, top_k=2) == {0, 1}
    assert drawn(min_p=0.5, temperature=2.0) == {0, 1, 2}, "after the temperature"
    assert drawn(min_p=0.5, top_p=0.6) == {0}, "what top_p sees is what min_p left"


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    draws = [sample(logits[None], [state([0] * i, seed=9)], EOS)[0].token for i in range(4_000)]
    for token, p in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(draws.count(token) / 4_000 - p) < 0.03


def test_numbers_differ_between_seeds_and_positions_but_never_between_runs() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in range(40) for position in range(40)}) == 1_600
    assert all(0 <= uniform(seed, 0) < 1 for seed in (0, -1, 2**64, 2**200))


def test_equal_logits_beyond_top_k_are_cut_by_id() -> None:
    kept = {one([1.0] * VOCAB, state(top_k=3, seed=seed)).token for seed in range(60)}
    assert kept == {0, 1, 2}


def test_end_and_stop_ids_wait_for_the_least_number_of_outputs() -> None:
    logits = [0.0] * VOCAB
    logits[1], logits[5] = 9.0, 8.0
    s = state([], temperature=0, min_tokens=2, stop_token_ids=(5,))
    assert one(logits, s).token == 0
    assert one(logits, state([3, 3], temperature=0, min_tokens=2)).token == 1
    assert one(logits, state([], temperature=0, min_tokens=2, ignore_eos=True)).token == 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = [float(i) / 3 for i in range(VOCAB)]
    raw = torch.log_softmax(torch.tensor(logits), dim=-1)
    got = one(logits, state([11], temperature=0, presence_penalty=50.0, logprobs=3))
    assert got.token == 10
    assert got.logprob == pytest.approx(float(raw[10]))
    assert [top.token for top in got.top] == [11, 10, 9]
    assert [top.logprob for top in got.top] == pytest.approx([float(raw[t]) for t in (11, 10, 9)])
    assert one(logits, state(temperature=0, logprobs=0)).top == ()
    assert one(logits, state(temperature=0)).logprob is None


def test_logits_that_are_not_finite_are_a_bug() -> None:
    with pytest.raises(Bug, match="not finite"):
        sample(torch.tensor([[0.0, math.nan]]), [state()], EOS)


def test_no_rows_draw_nothing() -> None:
    assert sample(torch.empty((0, VOCAB)), [], EOS) == []


@pytest.mark.parametrize(
    ("token", "n", "values", "want"),
    [
        (4, 3, {}, None),
        (1, 3, {}, FinishReason.STOP),
        (1, 3, {"ignore_eos": True}, None),
        (7, 3, {"stop_token_ids": (7,)}, FinishReason.STOP),
        (7, 3, {"stop_token_ids": (7,), "ignore_eos": True}, FinishReason.STOP),
        (1, 3, {"min_tokens": 3}, None),
        (1, 4, {"min_tokens": 3}, FinishReason.STOP),
        (4, 5, {"max_tokens": 5}, FinishReason.LENGTH),
        (1, 5, {"max_tokens": 5}, FinishReason.STOP),
        (1, 5, {"max_tokens": 5, "ignore_eos": True}, FinishReason.LENGTH),
    ],
)
def test_what_ends_a_request(token: int, n: int, values: dict[str, object], want: FinishReason | None) -> None:
    assert finish_reason(state(**values).params, token, n, EOS) is want
