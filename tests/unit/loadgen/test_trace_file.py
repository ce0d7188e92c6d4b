from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import ConfigError
from moonpool.loadgen.facts import trace_facts
from moonpool.loadgen.trace import Trace, TraceRow, read_trace, write_trace


def row(timestamp: object = 0, tokens: object = 1, output: object = 1, ids: object = (0,), **more: object) -> str:
    value = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids, **more}
    return json.dumps(value)


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_clean_file_gives_its_rows_and_no_notes(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, row(0, 513, 3, [7, 8]) + "\n" + row(5, 512, 1, [7]) + "\n"))
    assert trace.rows == (TraceRow(0, 513, 3, (7, 8), 1), TraceRow(5, 512, 1, (7,), 2))
    assert trace.notes.adjusted == trace.notes.unsorted == trace.notes.blank == 0


ODD_ROWS = [
    (row(0, 20, 1, [1, 2]), "hash_ids has 2 ids, but input_length 20 needs 1 at 512"),
    (row(0, 513, 1, [1]), "hash_ids has 1 ids, but input_length 513 needs 2"),
    (row(0, 0, 1, []), "input_length is 0"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids is missing or empty"),
    (row(0, 5, 1, None), "hash_ids is missing or empty"),
    (row("soon"), "timestamp 'soon' is not a number"),
    (row(-1), "timestamp -1 is not a number of ms from 0"),
    ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp nan"),
    (row(True), "timestamp True"),
    (row(0, "5"), "input_length '5' is not a whole number"),
    (row(0, 5.5), "input_length 5.5"),
    (row(0, 10**12, 1, [1]), "input_length 1000000000000"),
    (row(0, 5, None), "output_length missing"),
    (row(0, 5, 1, [-3]), "hash_ids -3"),
    (row(0, 5, 1, ["a"]), "hash_ids 'a'"),
    (row(0, 5, 1, 7), "hash_ids 7 is not a list"),
    ("[1, 2]", "not a JSON object"),
    ("{broken}", "not a JSON object"),
    ("[" * 100_000, "not a JSON object"),
    ('{"timestamp": ' + "9" * 5_000 + "}", "not a JSON object"),
]


@pytest.mark.parametrize(("line", "why"), ODD_ROWS, ids=[why for _, why in ODD_ROWS])
def test_an_odd_row_is_an_error_that_names_it(tmp_path: Path, line: str, why: str) -> None:
    path = written(tmp_path, row(0, 512, 1, [1]) + "\n\n" + line + "\n" + row(9) + "\n")
    with pytest.raises(ConfigError, match="row 3: ") as caught:
        read_trace(path)
    assert why in caught.value.message


@pytest.mark.parametrize(("line", "why"), ODD_ROWS, ids=[why for _, why in ODD_ROWS])
def test_adjusting_repairs_or_drops_an_odd_row_and_counts_it(tmp_path: Path, line: str, why: str) -> None:
    trace = read_trace(written(tmp_path, row(0, 512, 1, [1]) + "\n" + line + "\n" + row(9) + "\n"), adjust=True)
    assert trace.notes.adjusted == 1
    assert len(trace.rows) in (2, 3)
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in trace.rows)


def test_adjusting_cuts_and_continues_ids_with_ones_no_other_row_has(tmp_path: Path) -> None:
    lines = [row(0, 20, 1, [4, 5]), row(1, 1500, 1, [4]), row(2, 600, 1, None), row(3, 5, 1, [9])]
    trace = read_trace(written(tmp_path, "\n".join(lines)), adjust=True)
    assert [r.hash_ids for r in trace.rows] == [(4,), (4, 10, 11), (12, 13), (9,)]
    assert (trace.notes.ids_cut, trace.notes.ids_continued, trace.notes.ids_made) == (1, 1, 1)


def test_a_cut_last_line_is_told_apart_from_a_broken_one(tmp_path: Path) -> None:
    path = written(tmp_path, row(0) + "\n" + row(1)[:-9])
    with pytest.raises(ConfigError, match="row 2: the last line is cut off"):
        read_trace(path)
    trace = read_trace(path, adjust=True)
    assert len(trace.rows) == 1
    assert trace.notes.truncated == 1
    assert trace.notes.unreadable_dropped == 0


def test_a_whole_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, row(0) + "\n" + row(1))).rows) == 2


def test_byte_order_mark_crlf_blank_lines_and_other_fields_do_not_matter(tmp_path: Path) -> None:
    plain = read_trace(written(tmp_path, row(0, 5, 2, [3]) + "\n" + row(1, 6, 0, [3])))
    odd = b"\xef\xbb\xbf" + f"{row(0, 5, 2, [3], chat_id=8, type='tool')}\r\n\r\n  \r\n{row(1, 6, 0, [3])}\r\n".encode()
    trace = read_trace(written(tmp_path, odd))
    assert [(r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in trace.rows] == [
        (r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in plain.rows
    ]
    assert trace.notes.blank == 2
    assert trace.notes.adjusted == 0


def test_unsorted_rows_are_sorted_and_counted_and_ties_keep_file_order(tmp_path: Path) -> None:
    lines = [row(5, ids=[0]), row(1, ids=[1]), row(5, ids=[2]), row(0, ids=[3]), row(1, ids=[4]), row(5, ids=[5])]
    trace = read_trace(written(tmp_path, "\n".join(lines)))
    assert [r.hash_ids[0] for r in trace.rows] == [3, 1, 4, 0, 2, 5]
    assert trace.notes.unsorted == 3


def test_another_block_size_is_hinted_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fit 64 tokens per id"):
        read_trace(written(tmp_path, row(0, 300, 1, [1, 2, 3, 4, 5])))
    assert len(read_trace(written(tmp_path, row(0, 300, 1, [1, 2, 3, 4, 5])), block_tokens=64).rows) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\x1f\x8bnot gzip at all", gzip.compress(row().encode(), mtime=0)[:-12]],
    ids=["empty", "blank lines", "no gzip", "cut short"],
)
def test_an_empty_or_broken_file_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="trace"):
        read_trace(written(tmp_path, content))


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


ROWS = st.lists(
    st.builds(
        lambda t, blocks, rest, out, ids: (t, (blocks - 1) * 8 + rest, out, ids[:blocks]),
        st.integers(0, 50) | st.floats(0, 50, allow_nan=False),
        st.integers(1, 5),
        st.integers(1, 8),
        st.integers(0, 9),
        st.lists(st.integers(0, 2**63 - 1), min_size=5, max_size=5),
    ),
    min_size=1,
    max_size=20,
)


@given(ROWS, st.booleans())
def test_what_is_written_is_read_back_in_time_order(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float, int, int, list[int]]], packed: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl.gz" if packed else "t.jsonl")
    rows = [TraceRow(t, n, out, tuple(ids)) for t, n, out, ids in values]
    write_trace(path, rows)
    back = read_trace(path, block_tokens=8)
    wanted = sorted(rows, key=lambda r: r.timestamp_ms)
    assert [(r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in back.rows] == [
        (r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in wanted
    ]


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = [TraceRow(0, 5, 1, (1,))]
    write_trace(tmp_path / "a.jsonl.gz", rows)
    write_trace(tmp_path / "b.jsonl.gz", rows)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def published(name: str) -> Trace:
    folder = os.environ.get("MOONPOOL_TRACES")
    if folder is None or not (Path(folder) / name).is_file():
        pytest.skip(f"MOONPOOL_TRACES names no folder with {name}")
    return read_trace(Path(folder) / name)


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "mean_input", "blocks", "hits"),
    [
        ("conversation_trace.jsonl.gz", 12_031, 3_537.0, 12_035, 182_790, 0.3736),
        ("synthetic_trace.jsonl.gz", 3_993, 1_022.0, 15_325, 43_924, 0.6512),
    ],
)
def test_the_published_traces_read_without_adjustment(
    name: str, requests: int, span_s: float, mean_input: float, blocks: int, hits: float
) -> None:
    trace = published(name)
    facts = trace_facts(trace.rows, trace.block_tokens)
    assert trace.notes.adjusted == trace.notes.unsorted == 0
    assert (facts.requests, facts.distinct_blocks) == (requests, blocks)
    assert facts.span_s == pytest.approx(span_s, abs=0.5)
    assert facts.mean_input == pytest.approx(mean_input, abs=1)
    assert facts.ideal_hit_share == pytest.approx(hits, abs=0.0005)
