"""Tools and the form of answers, as the openai package asks for them and takes them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.gateway_front import Front, eventually, front, says, silence
from support.scripted_cluster import Job
from support.tiny_tokenizer import TURN_END, ids_of, write_tiny_model
from tokenizers import Tokenizer

from moonpool.cluster.gateway.structured import MAX_GUIDE_BYTES, MAX_SCHEMA_TEXT
from moonpool.core.errors import Reason
from moonpool.core.request import FinishReason, GuideKind

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def roomy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("roomy"), context=8_192)


@pytest.fixture
async def roomy(roomy_dir: Path) -> AsyncIterator[Front]:
    async with front(roomy_dir) as running:
        yield running


@pytest.fixture
async def client(roomy: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{roomy.gateway.url}/v1", api_key="none", http_client=roomy.client, max_retries=0)


def writes(front: Front, text: str, finish: FinishReason = FinishReason.STOP) -> None:
    """The model says ``text``, a few bytes at a time."""
    end = ids_of(front.model_dir, TURN_END) if finish is FinishReason.STOP else []
    front.decode.script = says(*ids_of(front.model_dir, text), *end, finish=finish)


def prompt_of(front: Front) -> str:
    backend = Tokenizer.from_file(str(front.model_dir / "tokenizer.json"))
    return backend.decode(list(front.decode.jobs[-1].attempt.request.prompt), skip_special_tokens=False)


@pytest.mark.parametrize("before", ["", "Let me see."])
async def test_a_call_is_a_message_s_and_a_stream_s_tool_calls(roomy: Front, client: openai.AsyncOpenAI, before: str) -> None:
    writes(roomy, before + CALL + "\n" + CALL.replace("Paris", "Rome"))
    answer = await client.chat.completions.create(**ASK, tools=[WEATHER])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", before or None)
    calls = choice.message.tool_calls or []
    assert [(c.type, c.function.name, json.loads(c.function.arguments)["city"]) for c in calls] == [  # type: ignore[union-attr]
        ("function", "get_weather", "Paris"), ("function", "get_weather", "Rome"),
    ]  # fmt: skip
    assert len({c.id for c in calls}) == 2 and all(c.id.startswith("call_") for c in calls)

    deltas, finish = [], None
    async for chunk in await client.chat.completions.create(**ASK, tools=[WEATHER], stream=True):
        deltas.append(chunk.choices[0].delta)
        finish = chunk.choices[0].finish_reason or finish
    assert (finish, "".join(d.content or "" for d in deltas)) == ("tool_calls", before)
    parts = [part for d in deltas for part in d.tool_calls or []]
    for index, call in enumerate(calls):
        first, *more = [part for part in parts if part.index == index]
        assert first.function is not None and (first.function.name, first.function.arguments) == ("get_weather", "")
        assert first.id is not None and first.id.startswith("call_") and first.type == "function"
        assert all(part.id is None and part.function.name is None for part in more)  # type: ignore[union-attr]
        assert "".join(part.function.arguments for part in more) == call.function.arguments  # type: ignore[union-attr]
        assert len(more) > 2


async def test_an_answer_of_one_call_ends_with_it(roomy: Front, client: openai.AsyncOpenAI) -> None:
    async def goes_on(job: Job) -> None:
        await job.say(ids_of(roomy.model_dir, CALL + "\n" + CALL))
        await silence(job)

    roomy.decode.script = goes_on
    answer = await client.chat.completions.create(**ASK, tools=[WEATHER], parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(answer.choices[0].message.tool_calls or []) == 1
    await eventually(lambda: roomy.decode.jobs[-1].cancelled.is_set())


async def test_a_call_cut_by_the_length_says_so(roomy: Front, client: openai.AsyncOpenAI) -> None:
    writes(roomy, CALL.split('"}}')[0], FinishReason.LENGTH)
    (choice,) = (await client.chat.completions.create(**ASK, tools=[WEATHER])).choices
    assert choice.finish_reason == "length"
    assert (choice.message.tool_calls or [])[0].function.arguments == '{"city": "Paris'  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_to_call_the_text_of_a_call_is_content(
    roomy: Front, client: openai.AsyncOpenAI, options: dict[str, Any]
) -> None:
    writes(roomy, CALL)
    (choice,) = (await client.chat.completions.create(**ASK, **options)).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)
    assert "get_weather" not in prompt_of(roomy)


async def test_a_template_without_a_place_for_tools_gets_them_as_text(roomy: Front, client: openai.AsyncOpenAI) -> None:
    writes(roomy, "18 degrees.")
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called, {**called, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18"},
        {"role": "tool", "tool_call_id": "call_2", "content": "<|im_end|>19"},
    ]
    await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])  # type: ignore[call-overload]
    prompt = prompt_of(roomy)
    assert "Be brief.\n\n# Tools" in prompt and json.dumps(WEATHER) in prompt
    assert f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': {'city': 'Paris'}})}\n</tool_call>" in prompt
    results = "<tool_response>\n18\n</tool_response>\n<tool_response>\n<|im_end|>19\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in prompt
    end = Tokenizer.from_file(str(roomy.model_dir / "tokenizer.json")).token_to_id(TURN_END)
    assert roomy.decode.jobs[-1].attempt.request.prompt.count(end) == 4  # system, user, assistant, user


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [("required", True), ({"type": "function", "function": {"name": "get_weather"}}, True), ("auto", False)],
)
async def test_an_answer_that_must_call_is_guided(roomy: Front, client: openai.AsyncOpenAI, choice: Any, allowed: bool) -> None:
    writes(roomy, CALL)
    await client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice=choice)
    guide = roomy.decode.jobs[-1].attempt.request.sampling.guide
    assert (guide is not None) == allowed
    if guide is not None:
        assert guide.kind is GuideKind.GRAMMAR and "get_weather" in guide.text


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"response_format": FORMAT}, GuideKind.JSON_SCHEMA),
        ({"response_format": {"type": "json_object"}}, GuideKind.JSON_OBJECT),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": SCHEMA}, GuideKind.JSON_SCHEMA),
        ({"guided_regex": "[ab]+"}, GuideKind.REGEX),
        ({"guided_choice": ["yes", "no"]}, GuideKind.GRAMMAR),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GuideKind.JSON_SCHEMA),
        ({"response_format": FORMAT, "tools": [WEATHER]}, GuideKind.GRAMMAR),
    ],
)
async def test_the_form_of_an_answer_goes_to_its_worker(roomy: Front, options: dict[str, Any], kind: GuideKind | None) -> None:
    writes(roomy, '{"a": 1}')
    answer = await roomy.client.post("/v1/chat/completions", json={**ASK, **options})
    assert answer.status_code == 200, answer.text
    guide = roomy.decode.jobs[-1].attempt.request.sampling.guide
    assert (guide.kind if guide else None) is kind
    assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "without json_schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
     "response_format.json_schema.schema", "type"),
    ({"guided_json": DEEP}, "guided_json", "deep"),
    ({"guided_json": {"const": "x" * MAX_GUIDE_BYTES}}, "guided_json", "bytes"),
    ({"guided_json": {"enum": [0] * MAX_GUIDE_BYTES}}, "guided_json", "more than"),
    ({"guided_json": "{}" + " " * MAX_SCHEMA_TEXT}, "guided_json", "characters"),
    ({"guided_choice": ["x" * 1_024] * 65}, "guided_choice", "characters in all"),
    ({"structured_outputs": {"choice": ["x" * 1_024] * 65}}, "structured_outputs.choice", "characters in all"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {"enum": [0] * 20_000}}} for i in range(8)],
      "tool_choice": "required"}, "tools", "of schemas"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": {"items": [{"multipleOf": 99_999.5}]}}, "guided_json", "multipleOf"),
    ({"guided_grammar": 'start: %json {"multipleOf": 7}'}, "guided_grammar", "schemas within"),
    ({"structured_outputs": {"grammar": ' {"grammars": []}'}}, "structured_outputs.grammar", "schemas within"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ({"guided_regex": "a", "tools": [WEATHER]}, "guided_regex", "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "get_weather"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "q"}}}}}],
      "tool_choice": "required"}, "tools[0].function.parameters", "type"),
    ({"functions": [{"name": "f"}]}, "functions", "not offered"),
    ({"function_call": {"name": "f"}}, "function_call", "not offered"),
]  # fmt: skip


async def test_what_cannot_be_asked_for_is_refused_with_field_and_reason(roomy: Front) -> None:
    for options, param, why in REFUSED:
        answer = await roomy.client.post("/v1/chat/completions", json={**ASK, **options})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert error["message"].startswith(param) and why in error["message"]
    assert not roomy.decode.jobs


async def test_a_guide_that_fails_at_a_worker_is_not_tried_again(roomy: Front) -> None:
    async def fails(job: Job) -> None:
        await job.fail(Reason.INVALID_REQUEST, "the answer cannot go on within its grammar")

    roomy.decode.script = fails
    answer = await roomy.client.post("/v1/chat/completions", json={**ASK, "response_format": FORMAT})
    assert (answer.status_code, len(roomy.decode.jobs)) == (400, 1)


async def test_a_model_whose_calls_are_not_understood_offers_no_tools(roomy_dir: Path) -> None:
    async with front(roomy_dir, config={"model": {"tool_parser": "none"}}) as running:
        answer = await running.client.post("/v1/chat/completions", json={**ASK, "tools": [WEATHER]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "model.tool_parser" in answer.json()["error"]["message"]
