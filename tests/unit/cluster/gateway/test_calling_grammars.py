"""An answer that must call is read by its family's parser as calls that follow their schemas, whatever the model would say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from support.tiny_tokenizer import TURN_END, write_tiny_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from moonpool.cluster.gateway.bodies import ChatBody, parse_chat
from moonpool.cluster.gateway.guiding import guide_of
from moonpool.cluster.gateway.tool_calls.families import FAMILIES, HERMES, LLAMA3, MISTRAL, Family
from moonpool.core.request import FinishReason, SamplingParams
from moonpool.engine.guides import Guides
from moonpool.engine.sampler import SamplerState, finish_reason, sample

PLACE = {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}, "how": {"enum": ['a"}', "</tool_call>", "é"]}},
        "required": ["place", "how"],
        "additionalProperties": False,
        "$defs": {"place": PLACE},
    },
    "find_all": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.fixture(scope="module", params=[False, True], ids=["marks are text", "marks are special tokens"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of bytes, with or without tokens for what opens and closes calls."""
    folder = write_tiny_model(tmp_path_factory.mktemp("marks"))
    if request.param:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        marks = [mark for family in FAMILIES.values() for mark in family.marks]
        backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        backend.save(str(folder / "tokenizer.json"))
    return folder


def body(**fields: Any) -> ChatBody:
    return parse_chat(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}).encode()
    )


def answers(folder: Path, family: Family, asked: ChatBody, seeds: range, start: str = "") -> list[str]:
    """Texts of answers that ended by themselves, as a parser sees them: with all marks. They begin with ``start``."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    eos = frozenset({special[TURN_END]})
    guides = Guides(folder, backend.get_vocab_size(), eos)
    found = guide_of(asked, family, special)
    assert found is not None
    texts = []
    for seed in seeds:
        params = SamplingParams(max_tokens=600, seed=seed, guide=found[1])
        outputs = backend.encode(start, add_special_tokens=False).ids
        ended = None
        while ended is None:
            logits = torch.randn(
                (1, backend.get_vocab_size()), generator=torch.Generator().manual_seed(seed * 997 + len(outputs))
            )
            logits[0, special[TURN_END]] += 2
            state = SamplerState(params, [], outputs, guides.allowed_by(params, outputs))
            outputs.append(sample(logits, [state], eos)[0].token)
            ended = finish_reason(params, outputs[-1], len(outputs), eos)
        if ended is FinishReason.STOP:
            texts.append(backend.decode(outputs[:-1], skip_special_tokens=False))
    return texts


def calls_of(family: Family, asked: ChatBody, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = family.parser(frozenset(SCHEMAS), parallel=asked.several_calls)
    parts = [*map(parser.push, text), parser.finish()]
    calls: list[list[str]] = []
    for piece in (call for part in parts for call in part.calls):
        if piece.name is not None:
            calls.append([piece.name, ""])
        calls[-1][1] += piece.arguments
    return "".join(part.text for part in parts), [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"tool_choice": "required"}, 16),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, 1),
    ],
    ids=["several", "one", "named"],
)
def test_an_answer_that_must_call_is_calls_alone(folder: Path, family: Family, fields: dict[str, Any], most: int) -> None:
    asked, counts, names = body(**fields), set(), set()
    for text in answers(folder, family, asked, range(14)):
        content, calls = calls_of(family, asked, text)
        assert content == "" and 1 <= len(calls) <= most, text
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        counts.add(len(calls))
        names |= {name for name, _ in calls}
    assert names <= {one.name for one in asked.functions}
    assert counts, "none of these answers ended"
    assert most == 1 or (len(counts) > 1 and names == set(SCHEMAS))


@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL], ids=lambda family: family.name)
def test_with_a_schema_for_the_answer_it_is_that_or_calls(folder: Path, family: Family) -> None:
    asked, kinds = body(response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": FORM}}), set()
    for text in answers(folder, family, asked, range(16)):
        content, calls = calls_of(family, asked, text)
        kinds.add(bool(calls))
        assert bool(content) != bool(calls)
        if content:
            jsonschema.validate(json.loads(content), FORM)
    assert kinds == {True, False}


@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL], ids=lambda family: family.name)
def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(folder: Path, family: Family) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    asked = body(tools=strict)
    starts = {HERMES: "Well.<tool_call>", LLAMA3: "{", MISTRAL: "Well.[TOOL_CALLS]"}
    called = 0
    for text in answers(folder, family, asked, range(8), starts[family]):
        content, calls = calls_of(family, asked, text)
        called += len(calls)
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        assert not content or content.startswith("Well.")
        assert calls, text
    assert called
    for text in answers(folder, family, asked, range(6), "Well, {"):
        content, calls = calls_of(family, asked, text)
        assert content.startswith("Well, {") and len(content) > len("Well, {"), "what is no call is free"
        assert all(jsonschema.validate(arguments, SCHEMAS[name]) is None for name, arguments in calls)
