from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.openai_server import event, text, usage

from moonpool.loadgen.stream import StreamReader, error_in


def chat(**delta: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def test_role_chunk_empty_content_and_keep_alives_are_not_the_first_text() -> None:
    reader = StreamReader()
    reader.feed(chat(role="assistant"), 0.005)
    reader.feed(b": keep-alive\n\n", 0.020)
    reader.feed(chat(role="assistant", content=""), 0.050)
    reader.feed(b": keep-alive\n\n", 0.100)
    assert reader.reading.first_text is None
    reader.feed(chat(content="Hi"), 0.200)
    reader.feed(b": keep-alive\n\n", 0.250)
    reader.feed(chat(content=""), 0.260)
    reader.feed(chat(content=" there"), 0.300)
    assert reader.reading.first_text == 0.200
    assert reader.reading.gaps == pytest.approx([0.1])
    assert reader.reading.first_chunk == 0.005


def test_usage_and_the_end_are_read() -> None:
    reader = StreamReader()
    reader.feed(text(" a") + text(" b", "length") + usage(600, 2, 512) + event("[DONE]"), 1.0)
    found = reader.reading
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (600, 2, 512)
    assert found.done
    assert found.finish_reason == "length"


def test_an_answer_without_text_counts_from_its_end() -> None:
    reader = StreamReader()
    reader.feed(text(""), 0.2)
    reader.feed(text("", "length"), 0.7)
    reader.feed(usage(5, 2), 0.8)
    assert reader.reading.first_text == 0.7
    assert reader.reading.gaps == []


def test_an_answer_of_no_token_has_no_first_text() -> None:
    reader = StreamReader()
    reader.feed(text("", "stop") + usage(5, 0), 0.7)
    assert reader.reading.first_text is None


def test_an_error_event_is_kept_with_its_code() -> None:
    reader = StreamReader()
    reader.feed(text(" a") + event({"error": {"message": "the worker is gone", "code": "peer_silent"}}), 0.1)
    assert (reader.reading.error, reader.reading.error_code) == ("the worker is gone", "peer_silent")


@pytest.mark.parametrize(
    "raw", [b"data: {broken\n", b"data: [1]\n", b"data: " + b"[" * 50_000 + b"\n", b"data: " + b"x" * (1 << 21)]
)
def test_a_body_that_is_no_event_stream_is_an_error(raw: bytes) -> None:
    reader = StreamReader()
    reader.feed(raw, 0.1)
    assert reader.reading.error


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": []},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"usage": {"prompt_tokens": "5"}},
        {},
    ],
)
def test_events_of_unknown_shape_are_passed_over(odd: dict[str, object]) -> None:
    reader = StreamReader()
    reader.feed(event(odd), 0.1)
    assert not reader.reading.error
    assert reader.reading.first_text is None
    assert reader.reading.prompt_tokens is None


STREAM = (
    chat(role="assistant") + b": ping\r\n\r\n" + text("ä") + text("") + text(" b", "length") + usage(7, 2, 1) + event("[DONE]")
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_where_the_network_cuts_the_stream_does_not_matter(cuts: list[int]) -> None:
    reader = StreamReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    for a, b in pairwise(edges):
        reader.feed(STREAM[a:b], float(b))
    found = reader.reading
    assert len(found.texts) == 2
    assert found.done
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (7, 2, 1)


def test_error_bodies_of_any_shape_give_words() -> None:
    assert error_in({"error": {"message": "no", "type": "busy"}}) == ("no", "busy")
    assert error_in({"error": "no"}) == ("no", "")
    assert error_in({"detail": "no"}) == ("{'detail': 'no'}", "")
    assert error_in([1]) == ("[1]", "")
