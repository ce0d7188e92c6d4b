from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from moonpool.cli.simulate import simulate
from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.loadgen.trace import write_trace
from moonpool.sim.suite.paper import run_suite
from moonpool.sim.suite.report import in_words
from moonpool.sim.suite.workload import Workload, load


def moonpool_simulate(*words: str) -> Result:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, words)


def test_the_suite_prints_one_json_document_and_counts_what_was_not_run(tmp_path: Path) -> None:
    words = ("--suite", "paper", "--subset", "ci", "--only", "small.prediction", "-o", str(tmp_path), "--json")
    done = moonpool_simulate(*words)
    assert done.exit_code == 0
    shown = json.loads(done.stdout)
    assert [row["verdict"] for row in shown["rows"] if row["name"] == "small.prediction"] == ["met"]
    assert shown["missed"] == shown["skipped"] == len(shown["rows"]) - 1
    assert (tmp_path / "suite.json").is_file()
    assert "required rows missed" in (tmp_path / "suite.txt").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--suite", "papers"), "--suite: 'papers' is none of paper"),
        (("--suite", "paper", "--subset", "some"), "--subset: 'some' is none of all, ci, tuning"),
        (("--suite", "paper"), "give their folder, or --subset ci"),
        (("--suite", "paper", "--traces", "nowhere"), "--traces: nowhere holds neither"),
        (("--traces", "nowhere"), "add --suite paper"),
        (("--only", "ttft.*"), "add --suite paper"),
    ],
)
def test_a_suite_that_cannot_be_meant_is_told(words: tuple[str, ...], told: str) -> None:
    done = moonpool_simulate(*words)
    assert isinstance(done.exception, ConfigError)
    assert told in done.exception.message


def test_policies_are_compared_with_their_settings_in_one_table_and_picture(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, load(Workload(trace="made", first=60), None))
    cluster = ("--trace", str(trace), "--cluster", "llama70b_prefill", "--prefill", "2", "-o", str(tmp_path))
    done = moonpool_simulate(*cluster, "--compare", "random,seed=3,local_min_ttft", "--json")
    assert done.exit_code == 0, done.exception
    figures = json.loads(done.stdout)
    assert list(figures) == ["random,seed=3", "local_min_ttft"]
    assert figures["local_min_ttft"]["ttft_mean_s"] < figures["random,seed=3"]["ttft_mean_s"]
    assert (tmp_path / "compared.png").is_file()


def test_one_policy_is_no_comparison_and_a_wrong_name_ends_it_before_anything_runs(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, load(Workload(trace="made", first=5), None))
    done = moonpool_simulate("--trace", str(trace), "--compare", "random")
    assert isinstance(done.exception, ConfigError)
    done = moonpool_simulate("--trace", str(trace), "--compare", "random,wrong")
    assert isinstance(done.exception, InvalidRequest)
    assert "requests" not in done.stderr


@pytest.mark.timeout(900)  # minutes on a quiet machine of two cores
def test_the_subset_for_every_change_meets_all_its_rows_on_the_public_traces(tmp_path: Path) -> None:
    traces = Path(os.environ.get("MOONPOOL_TRACES", ""))
    for name in ("conversation_trace.jsonl.gz", "synthetic_trace.jsonl.gz"):
        if not (traces / name).is_file():
            pytest.skip(f"MOONPOOL_TRACES names no folder with {name}")
    report = run_suite(traces=traces, subset="ci", folder=tmp_path)
    assert report.missed == 0, in_words(report)
