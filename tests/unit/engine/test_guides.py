"""Guided answers: always within their grammar, and a function of the guide and the ids so far alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from support.tiny_tokenizer import TURN_END, ids_of, write_tiny_model
from tokenizers import Tokenizer as Backend

from moonpool.core.errors import InvalidRequest
from moonpool.core.request import FinishReason, Guide, GuideKind, SamplingParams
from moonpool.engine import guides as module
from moonpool.engine.guides import Guides
from moonpool.engine.sampler import SamplerState, finish_reason, sample

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "🍋"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "number"}}}]}},
}


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def backend(folder: Path) -> Backend:
    return Backend.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def eos(backend: Backend) -> frozenset[int]:
    return frozenset({backend.token_to_id(TURN_END), backend.token_to_id("</s>")})


@pytest.fixture(scope="module")
def make(folder: Path, backend: Backend, eos: frozenset[int]) -> Callable[[], Guides]:
    return lambda: Guides(folder, backend.get_vocab_size() + 5, eos)  # a few rows of padding, as many models have


@pytest.fixture(scope="module")
def guides(make: Callable[[], Guides]) -> Guides:
    return make()


def answer(
    guides: Guides, eos: frozenset[int], guide: Guide, seed: int, start: list[int] | None = None, **values: Any
) -> tuple[list[int], FinishReason]:
    """Random logits that a function of seed and position gives, from the ids of ``start`` on."""
    params = SamplingParams(**{"max_tokens": 400, "seed": seed, "guide": guide, **values})
    outputs, size = list(start or []), guides._vocab_size
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000 + len(outputs))
        state = SamplerState(params, [1, 2, 3], outputs, guides.allowed_by(params, outputs))
        logits = torch.randn((1, size), generator=generator) * 3
        outputs.append(sample(logits, [state], eos)[0].token)
        if reason := finish_reason(params, outputs[-1], len(outputs), eos):
            return outputs, reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_an_answer_that_stops_follows_its_schema_and_one_that_is_cut_begins_so(
    guides: Guides, backend: Backend, eos: frozenset[int], seed: int, temperature: float
) -> None:
    ids, reason = answer(guides, eos, schema(PERSON), seed, temperature=temperature, top_k=seed % 3)
    text = backend.decode(ids)
    if reason is FinishReason.STOP:
        assert ids[-1] in eos
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert text.startswith("{")
    short, cut = answer(guides, eos, schema(PERSON), seed, temperature=temperature, top_k=seed % 3, max_tokens=9)
    assert (short, cut) == (ids[:9], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("guide", "right"),
    [
        (Guide(GuideKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
        (Guide(GuideKind.REGEX, "[ab]{3,5}(x|é)"), lambda text: re.fullmatch("[ab]{3,5}(x|é)", text)),
        (Guide(GuideKind.GRAMMAR, 'start: "yes" | "no 🍋"'), lambda text: text in ("yes", "no 🍋")),
    ],
    ids=["object", "regex", "choice"],
)
def test_other_guides(guides: Guides, backend: Backend, eos: frozenset[int], guide: Guide, right: Any) -> None:
    ended = 0
    for seed in range(8):
        ids, reason = answer(guides, eos, guide, seed)
        if reason is FinishReason.STOP:
            ended += 1
            assert right(backend.decode(ids)), backend.decode(ids)
    assert ended


def test_what_is_allowed_depends_on_the_ids_alone_however_they_were_read(
    make: Callable[[], Guides], eos: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = schema(PERSON)
    step_by_step = make()
    ids, _ = answer(step_by_step, eos, guide, 3)
    anew = make()
    monkeypatch.setattr(module, "STATES", 1)
    forgetful = make()
    for n in random.Random(1).sample(range(len(ids)), min(12, len(ids))):
        want = step_by_step.allowed(guide, ids[:n])
        assert np.array_equal(anew.allowed(guide, ids[:n]), want)
        assert np.array_equal(forgetful.allowed(guide, ids[:n]), want)
        assert want[ids[n]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_answer_goes_on_as_the_one_before(
    make: Callable[[], Guides], eos: frozenset[int], temperature: float
) -> None:
    guide = schema(PERSON)
    ids, reason = answer(make(), eos, guide, 5, temperature=temperature)
    for n in (0, 1, 7, len(ids) - 1):
        assert answer(make(), eos, guide, 5, ids[:n], temperature=temperature) == (ids, reason)


def test_answers_side_by_side_do_not_disturb_one_another(guides: Guides, eos: frozenset[int]) -> None:
    guide = schema(PERSON)
    alone = [answer(guides, eos, guide, seed)[0] for seed in range(4)]
    for n in range(max(map(len, alone))):
        for ids in alone:
            if n < len(ids):
                assert guides.allowed(guide, ids[:n])[ids[n]]


def test_after_the_end_only_ends_of_sequence_may_come(guides: Guides, folder: Path, eos: frozenset[int]) -> None:
    guide = Guide(GuideKind.REGEX, "ab")
    ids = ids_of(folder, "a", "b")
    assert set(np.flatnonzero(guides.allowed(guide, ids))) == eos
    assert not eos & set(np.flatnonzero(guides.allowed(guide, ids[:1])))
    assert set(np.flatnonzero(guides.allowed(guide, [*ids, min(eos)]))) == eos


def test_a_minimum_length_is_kept_with_ends_of_sequence_that_do_not_count(guides: Guides, eos: frozenset[int]) -> None:
    ids, reason = answer(guides, eos, Guide(GuideKind.REGEX, "ab"), 1, min_tokens=5)
    assert (len(ids), reason) == (6, FinishReason.STOP)
    assert set(ids[2:]) <= eos


def test_log_probabilities_are_those_without_the_guide(guides: Guides, folder: Path, eos: frozenset[int]) -> None:
    (wanted,) = ids_of(folder, "a")
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=1, guide=Guide(GuideKind.REGEX, "a"))
    logits = torch.zeros((1, guides._vocab_size))
    logits[0, wanted + 1] = 5.0
    sampled = sample(logits, [SamplerState(params, [], [], guides.allowed_by(params, []))], eos)[0]
    assert (sampled.token, sampled.top[0].token) == (wanted, wanted + 1)
    assert sampled.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[wanted]))


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        (Guide(GuideKind.JSON_SCHEMA, "[1]"), "object"),
        (schema({"type": "no such type"}), "type"),
        (schema({"type": "string", "format": "no-such-format"}), "format"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "nsatisfiable"),
        (schema({"$ref": "https://example.com/schema.json"}), "fetch"),
        (Guide(GuideKind.REGEX, "(a"), "regex"),
        (Guide(GuideKind.REGEX, "(?=a)b"), "look"),
        (Guide(GuideKind.GRAMMAR, "start: nothing"), "nothing"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(guides: Guides, guide: Guide, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        guides.prepare(guide)
    assert not guides.knows(guide)


def test_ids_that_left_the_grammar_are_refused_not_followed(guides: Guides, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot go on"):
        guides.allowed(Guide(GuideKind.REGEX, "ab"), ids_of(folder, "b"))


def test_a_model_without_an_end_of_sequence_cannot_be_guided(folder: Path, backend: Backend) -> None:
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        Guides(folder, backend.get_vocab_size(), frozenset()).prepare(Guide(GuideKind.JSON_OBJECT))


def test_what_costs_too_much_is_refused_before_it_is_used_and_not_kept(make: Callable[[], Guides]) -> None:
    guides, guide = make(), Guide(GuideKind.REGEX, "a{2,5}")
    with pytest.raises(InvalidRequest, match="to compile, more than"):
        guides.judge(guide, compile_s=0, step_s=1)
    with pytest.raises(InvalidRequest, match="an id to follow, more than"):
        guides.judge(guide, compile_s=1, step_s=0)
    assert not guides.knows(guide)
    guides.judge(guide, compile_s=1, step_s=1)
    guides.judge(guide, compile_s=0, step_s=0)  # it is at hand


def test_an_object_of_many_properties_can_be_followed(guides: Guides, eos: frozenset[int]) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(1_000)}, "additionalProperties": False}
    guides.judge(schema(wide), compile_s=10, step_s=1)
    assert len(answer(guides, eos, schema(wide), 1, max_tokens=12)[0]) >= 2


def test_no_more_is_kept_than_the_limits_say(make: Callable[[], Guides], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAMMARS", 2)
    guides = make()
    wanted = [Guide(GuideKind.REGEX, f"a{{{n}}}") for n in range(1, 5)]
    for guide in wanted:
        guides.prepare(guide)
    assert [guides.knows(guide) for guide in wanted] == [False, False, True, True]
