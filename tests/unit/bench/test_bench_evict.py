from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.bench.evict import POLICIES, SIZES, evict
from moonpool.cli.bench import bench
from moonpool.loadgen.trace import TraceRow, write_trace
from moonpool.sim.one_cache import turns


def chat(turn: int, who: int) -> TraceRow:
    """Turn ``turn`` of a conversation: two blocks more than the turn before, behind one that all conversations share."""
    ids = (0, *(1_000 * (who + 1) + i for i in range(2 * turn)))
    return TraceRow(1e3 * (10 * turn + who), 512 * len(ids), 10, ids)


def test_turns_are_told_from_matches_beyond_what_all_share() -> None:
    starts = [TraceRow(0.0, 1_024, 1, (0, 5_000 + i)) for i in range(30)]
    assert list(turns([*starts, chat(1, 0), chat(1, 1), chat(2, 0), chat(3, 0), chat(2, 1)], 512))[30:] == [1, 1, 2, 3, 2]


def test_every_policy_finds_all_that_can_be_found_when_everything_fits(tmp_path: Path) -> None:
    rows = [chat(turn, who) for turn in (1, 2, 3) for who in range(4)]
    write_trace(tmp_path / "t.jsonl", rows)
    ideal = 512 * (3 + 4 * 3 + 4 * 5) / sum(row.input_length for row in rows)
    figures = evict(trace=str(tmp_path / "t.jsonl"))
    for name in POLICIES:
        for size in SIZES:
            assert figures[f"{name}_{size // 1_000_000}M"] == pytest.approx(ideal)


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", [chat(1, 0), chat(2, 0)])
    done = CliRunner().invoke(bench, ["evict", "--trace", str(tmp_path / "t.jsonl"), "--policy", "lru", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["lru_1M"] == pytest.approx(3 / 8)


def test_lru_hits_of_the_published_traces_are_reproduced() -> None:
    path = Path(os.environ.get("MOONPOOL_TRACES", "")) / "conversation_trace.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"MOONPOOL_TRACES names no folder with {path.name}")
    figures = evict(trace=str(path), policies=("lru",), sizes=(1_000_000,))
    assert figures["lru_1M"] == pytest.approx(0.0543, abs=0.005)
