from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.gateway.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from moonpool.cluster.gateway.fields import _explain
from moonpool.core.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return parse_chat(json.dumps({"model": "m", "messages": USER, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"presence_penalty": 99}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"max_tokens": -3}, "max_tokens", "greater than or equal to"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": "7"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "set stream to false"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "greater than or equal to 1"),
        ({"suffix": "end"}, "suffix", "use ''"),
        ({"seed": 1 << 64}, "seed", "less than"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a", 1]}, "stop", "non-empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens 4"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"stream": False, "stream_options": {}}, "stream_options", "set stream to true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "use ids as names"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "each once"),
        ({"logit_bias": {"50": 101}}, "logit_bias.50", "less than or equal to 100"),
        ({"response_format": {"type": "json"}}, "response_format.type", "'text'"),
        ({"functions": [{"name": "f"}]}, "functions", "use []"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"zzz": 1}, "zzz", "leave it out"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_what_would_be_right(fields: dict[str, Any], param: str, says: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as e:
            parse(**fields)
        assert e.value.param == param
        assert says in e.value.message
        assert e.value.message.startswith((param, repr(param)))


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], [[1], []], 5, {"a": 1}, [1, "a"], ["a", 1], [[1], "a"], [-1]]
)
def test_prompts_that_are_empty_or_of_mixed_kinds(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as e:
        completion(prompt=prompt)
    assert e.value.param == "prompt"
    assert len(e.value.message) < 200


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([7], [[7]])],
)
def test_the_four_kinds_of_prompt(prompt: Any, choices: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == choices


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "hi", "mood": "good"}], "messages[0].mood"),
    ],
)
def test_messages_that_are_not_a_conversation(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        chat(messages=messages)
    assert e.value.param == param


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff", b'{"model": NaN}', b'{"a": "\\ud800"}', b"[" * 10_000, b'{"model":"m"} x'],
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^body: "):
        parse_chat(raw)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b'"tool_calls":[' + b"1," * 100_000 + b"1]", r"messages\[0\]\.tool_calls\[0\]"),
        (b",".join(b'"%x":1' % i for i in range(100_000)), r"body: an object in it has 100001 fields"),
    ],
)
def test_a_body_with_very_many_mistakes_costs_no_more_than_one(
    message: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def explain(errors: list[Any], hints: Mapping[str, str]) -> InvalidRequest:
        told.append(len(errors))
        return _explain(errors, hints)

    monkeypatch.setattr("moonpool.cluster.gateway.fields._explain", explain)
    with pytest.raises(InvalidRequest, match=says):
        parse_chat(b'{"model":"m","messages":[{"role":"user",' + message + b"}]}")
    assert told == [1]


def test_missing_fields_are_named() -> None:
    for raw, param in ((b'{"prompt":"a"}', "model"), (b'{"model":"m"}', "prompt")):
        with pytest.raises(InvalidRequest, match="required") as e:
            parse_completion(raw)
        assert e.value.param == param


def test_null_means_absent_and_harmless_fields_are_ignored() -> None:
    body = completion(
        max_tokens=None, stop=None, logprobs=None, n=None, seed=None, suffix=None, user="me", metadata={"a": "b"}, store=True,
        logit_bias={}, tools=[], response_format={"type": "text"}, best_of=1, request_id="x", tool_choice="none",
    )  # fmt: skip
    assert (body.max_tokens, body.stops, body.alternatives) == (None, (), None)


def test_nothing_may_be_generated_where_the_prompt_is_shown_or_scored() -> None:
    assert completion(echo=True, max_tokens=0).wanted_tokens == 0
    assert completion(prompt_logprobs=0, max_tokens=0).prompt_alternatives == 0
    for parse, fields in (
        (completion, {"max_tokens": 0}),
        (completion, {"max_tokens": 0, "logprobs": 1}),
        (chat, {"max_tokens": 0}),
    ):
        with pytest.raises(InvalidRequest) as e:
            parse(**fields)
        assert e.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"logprobs": 3, "prompt_logprobs": 1}, 1),
    ],
)
def test_log_probabilities_of_the_prompt_are_wanted_by_echo_and_by_name(fields: dict[str, Any], wanted: int | None) -> None:
    assert completion(**fields).prompt_alternatives == wanted


def test_the_best_are_chosen_from_no_fewer_than_are_shown_and_not_in_streams() -> None:
    assert (completion().drawn, completion(n=3).drawn, completion(n=2, best_of=5).drawn, chat(n=4).drawn) == (1, 3, 5, 4)
    assert completion(n=2, best_of=2, stream=True).drawn == 2
    for parse, fields in (
        (completion, {"n": 3, "best_of": 2}),
        (completion, {"best_of": 2, "stream": True}),
        (chat, {"best_of": 2}),
    ):
        with pytest.raises(InvalidRequest) as e:
            parse(**fields)
        assert e.value.param == "best_of"


def test_either_name_of_the_output_limit_but_not_two_different_ones() -> None:
    assert (chat(max_tokens=5).wanted_tokens, chat(max_tokens=5).tokens_field) == (5, "max_tokens")
    assert chat(max_completion_tokens=6).tokens_field == "max_completion_tokens"
    assert chat(max_completion_tokens=6, max_tokens=6).wanted_tokens == 6
    with pytest.raises(InvalidRequest) as e:
        chat(max_completion_tokens=6, max_tokens=7)
    assert e.value.param == "max_tokens"


def test_log_probabilities_in_each_endpoint_s_own_terms() -> None:
    assert completion(logprobs=3).alternatives == 3
    assert chat(logprobs=True).alternatives == 0
    assert chat(logprobs=True, top_logprobs=2).alternatives == 2
    assert chat(logprobs=False).alternatives is None
    for parse, fields, param in (
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (chat, {"logprobs": 2}, "logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ):
        with pytest.raises(InvalidRequest) as e:
            parse(**fields)
        assert e.value.param == param


def test_text_parts_are_one_text_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}])
    assert body.messages[0].for_template() == {"role": "system", "content": "a\nb"}
    assert body.messages[1].for_template() == {"role": "assistant", "content": ""}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "user", "x"})


@given(fields=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=5), basis=st.booleans())
def test_no_json_gives_anything_but_a_body_or_a_named_error(fields: dict[str, Any], basis: bool) -> None:
    for parse, start in ((parse_completion, {"model": "m", "prompt": "p"}), (parse_chat, {"model": "m", "messages": USER})):
        try:
            parse(json.dumps({**(start if basis else {}), **fields}).encode())
        except InvalidRequest as e:
            named = bool(e.message) and e.param is not None
            assert named
