"""What models write, to content and calls: wherever its pieces break, and however near it comes to being a call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.gateway.tool_calls.families import FAMILIES, HERMES, LLAMA3, MISTRAL, Family, family_of
from moonpool.cluster.gateway.tool_calls.reading import HELD_CHARS, MAX_TRIES, Said

NAMES = ("get_weather", "f")
ARGUMENTS = st.dictionaries(st.text(max_size=4), st.recursive(st.integers() | st.text(max_size=8), st.lists, max_leaves=4))
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4)
PLAIN = st.text(alphabet="ab c\n.", max_size=12)
FAMILY = st.sampled_from(list(FAMILIES.values()))
# Shreds of calls of every family, in any order: most texts made of them are none.
SHREDS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool", '{"name": "f"', '"get_weather"']
        + ['{"name":"f","arguments":{', '"parameters": {', '"arguments": "{}"', "{", "}", "[", "]", ";", ",", ":", '"', "\\"]
        + [" ", "\n", "f", "x", '{"name": "g", "arguments": {}}', '{"arguments": {"a": [1]}, "name": "f"}', "👩‍👧"]
    ),
    max_size=14,
).map("".join)


def said(family: Family, pieces: Sequence[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call."""
    parser = family.parser(NAMES, parallel=parallel)
    parts: list[Said] = []
    for piece in pieces:
        parts.append(parser.push(piece))
        if parser.over:
            break
    parts.append(parser.finish())
    calls: list[tuple[str, str]] = []
    for call in (one for part in parts for one in part.calls):
        if call.name is not None:
            assert (call.index, call.arguments) == (len(calls), "")
            calls.append((call.name, ""))
        else:
            assert call.index == len(calls) - 1, "pieces of a call that is not the newest"
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(part.text for part in parts), calls


def written(family: Family, calls: Sequence[tuple[str, Any]], dump: Callable[[Any], str] = json.dumps) -> str:
    """As models of the family write them."""
    ones = [f'{{"name": {json.dumps(name)}, "{family.arguments}": {dump(arguments)}}}' for name, arguments in calls]
    return family.first + family.between.join(f"{family.before}{one}{family.after}" for one in ones) + family.last


def cut(text: str, at: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(i % (len(text) + 1) for i in at)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(family=FAMILY, calls=CALLS, before=PLAIN, at=CUTS, indent=st.sampled_from([None, 2]))
def test_calls_come_out_as_they_were_written(
    family: Family, calls: list[tuple[str, Any]], before: str, at: list[int], indent: int | None
) -> None:
    if family is LLAMA3:
        before = ""  # its calls are the whole answer
    text = before + written(family, calls, lambda value: json.dumps(value, indent=indent))
    content, found = said(family, cut(text, at))
    assert content == (before if before.strip() else "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(family=FAMILY, text=SHREDS, at=CUTS)
def test_where_the_pieces_break_makes_no_difference(family: Family, text: str, at: list[int]) -> None:
    whole = said(family, [text])
    assert said(family, cut(text, at)) == whole
    assert said(family, list(text)) == whole


@given(family=FAMILY, text=SHREDS, at=CUTS)
def test_text_without_a_call_is_content_to_the_last_character(family: Family, text: str, at: list[int]) -> None:
    content, calls = said(family, cut(text, at))
    if not calls:
        assert content == text


@given(family=FAMILY, calls=CALLS, after=SHREDS, at=CUTS)
def test_what_stands_in_calls_is_never_content_too(
    family: Family, calls: list[tuple[str, Any]], after: str, at: list[int]
) -> None:
    secret = [(name, {**arguments, "k": "SECRET"}) for name, arguments in calls]
    content, found = said(family, cut(written(family, secret) + after, at))
    assert [name for name, _ in found][: len(calls)] == [name for name, _ in calls]
    assert sum(arguments.count("SECRET") for _, arguments in found) == len(calls)
    assert "SECRET" not in content


@given(family=FAMILY, calls=CALLS, at=CUTS)
def test_an_answer_of_one_call_is_over_with_it(family: Family, calls: list[tuple[str, Any]], at: list[int]) -> None:
    content, found = said(family, cut(written(family, calls), at), parallel=False)
    assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == ("", calls[:1])


def test_a_name_comes_before_its_arguments_and_those_as_they_are_written() -> None:
    parser = HERMES.parser(NAMES, parallel=True)
    assert parser.push('<tool_call>\n{"name": "f", "argu').calls == ()
    assert [(c.name, c.arguments) for c in parser.push('ments": {"a').calls] == [("f", ""), (None, '{"a')]
    assert [(c.name, c.arguments) for c in parser.push('": "b').calls] == [(None, '": "b')]
    assert [(c.name, c.arguments) for c in parser.push('"}}\n</tool_').calls] == [(None, '"}')]


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>', ..., []),  # no tool of that name
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ..., []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "{"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", [("f", '{"a": "</tool_call>"}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),  # cut by max_tokens
        (HERMES, '<tool_call>{"name": "f", "argu', ..., []),
        (HERMES, 'use <tool_call> like <tool_call>{"name": "f"}</tool_call>', "use <tool_call> like ", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call> Done.', " Done.", [("f", "{}")]),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "f"}', "", [("f", '{"a": 1}'), ("f", "{}")]),
        (LLAMA3, 'ok <|python_tag|>{"name": "f", "parameters": {}}', "ok ", [("f", "{}")]),
        (LLAMA3, 'The object {"name": "f", "parameters": {}}', ..., []),
        (LLAMA3, '{"name": "Ann", "age": 3}', ..., []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdef123"}]', "", [("f", "{}")]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 2}', "", [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
        (MISTRAL, "[TOOL_CALLS] are made by [ARGS]", ..., []),
    ],
)
def test_what_models_write(family: Family, text: str, content: Any, calls: list[tuple[str, str]]) -> None:
    assert said(family, [text]) == (text if content is ... else content, calls)
    assert said(family, list(text)) == (text if content is ... else content, calls)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_held_back_is_bounded(family: Family) -> None:
    opening = family.first + family.before + '{"name": "'
    parser = family.parser(NAMES, parallel=True)
    given_out = sum(len(parser.push("x" * 1_000).text) for _ in range(200))
    parser = family.parser(NAMES, parallel=True)
    given_out = len(parser.push(opening).text) + sum(len(parser.push("x" * 1_000).text) for _ in range(200))
    assert given_out >= 200_000 - 2 * HELD_CHARS


def test_after_many_beginnings_that_were_none_no_more_is_looked_for() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert said(HERMES, ["<tool_call>x" * (MAX_TRIES - 1) + call])[1] == [("f", "{}")]
    text = "<tool_call>x" * MAX_TRIES + call
    assert said(HERMES, [text]) == said(HERMES, list(text)) == (text, [])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", HERMES),
        ("{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ('{% if tools is not none %}{"name": function name, "parameters": ...}<|python_tag|>{% endif %}', LLAMA3),
        ('{% if tools %}<|start_header_id|>{"name": function name, "parameters": ...}{% endif %}', LLAMA3),
        ('{% if tools %}{"name": ..., "parameters": ...}{% endif %}', None),
        ("{% if tools %}<tool_call><function=f><parameter=a>{% endif %}", None),
        ("{% if tools %}<｜tool▁calls▁begin｜>{% endif %}", None),
    ],
)
def test_the_family_is_read_from_the_chat_template(template: str, family: Family | None) -> None:
    assert family_of(template) is family
