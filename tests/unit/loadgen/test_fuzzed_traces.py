"""Traces and answers gone wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import fuzzing, mutated, odd_json, stands

from moonpool.loadgen.stream import StreamReader
from moonpool.loadgen.trace import read_trace

ROW = {"timestamp": 27482, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 59]}
LINE = json.dumps(ROW).encode() + b"\n"


@fuzzing(80)
@given(data=st.one_of(mutated(LINE, LINE * 3), odd_json(ROW), mutated(gzip.compress(LINE * 2, mtime=0))), adjust=st.booleans())
def test_traces(tmp_path_factory: pytest.TempPathFactory, data: bytes, adjust: bool) -> None:
    path: Path = tmp_path_factory.mktemp("trace") / "rows"
    path.write_bytes(data)
    stands(lambda: read_trace(path, adjust=adjust))


@fuzzing(60)
@given(
    st.one_of(
        mutated(
            b'data: {"choices": [{"text": "a", "finish_reason": null}], "usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n'
        ),
        odd_json({"choices": [{"text": "a", "delta": {"content": "b"}}], "usage": {"prompt_tokens": 3}, "error": {}}).map(
            lambda raw: b"data: " + raw + b"\n\n"
        ),
    ),
    st.integers(1, 50),
)
def test_streamed_answers(data: bytes, step: int) -> None:
    reader = StreamReader()
    for at in range(0, min(len(data), 20_000), step):
        stands(lambda at=at: reader.feed(data[at : at + step], 0.0))  # type: ignore[misc]
