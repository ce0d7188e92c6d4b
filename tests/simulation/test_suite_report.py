from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.sim.suite.finished import Finished, code_version
from moonpool.sim.suite.paper import paper_rows, run_suite
from moonpool.sim.suite.report import Report, in_words, judge
from moonpool.sim.suite.rows.row import Row, Target, figure, near
from moonpool.sim.suite.settings import CacheRun, PredictionRun, digest
from moonpool.sim.suite.workload import Workload

CODE = "some version"
RUN = PredictionRun()


def row(target: Target, *, stretch: bool = False, name: str = "a.row") -> Row:
    return Row(name, "what it says", "0.5 (paper)", (RUN,), figure("value"), target, stretch)


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (Target(least=1.0), 1.0, "met"),
        (Target(least=1.0), 0.999, "missed"),
        (Target(most=1.0), 1.0, "met"),
        (Target(most=1.0), 1.001, "missed"),
        (near(1.0, 0.1), 1.05, "met"),
        (near(1.0, 0.1), 1.15, "missed"),
        (Target(least=0.0), float("nan"), "failed"),
    ],
)
def test_a_row_is_met_within_its_target_only(target: Target, value: float, verdict: str) -> None:
    judged = judge(row(target), {digest(RUN, CODE): {"value": value}}, CODE)
    assert judged.verdict == verdict


def test_rows_that_failed_or_were_not_run_are_missed_and_stretch_rows_told_apart() -> None:
    met = judge(row(Target(least=0.0)), {digest(RUN, CODE): {"value": 1.0}}, CODE)
    failed = judge(row(Target(least=0.0)), {digest(RUN, CODE): "ValueError: no"}, CODE)
    without = judge(row(Target(least=0.0)), {digest(RUN, CODE): {"other": 1.0}}, CODE)
    skipped = judge(row(Target(least=0.0)), {}, CODE)
    stretch = judge(row(Target(least=2.0), stretch=True), {digest(RUN, CODE): {"value": 1.0}}, CODE)
    assert [one.verdict for one in (met, failed, without, skipped, stretch)] == ["met", "failed", "failed", "skipped", "missed"]
    report = Report((met, failed, without, skipped, stretch), CODE, {})
    assert report.missed == 3
    shown = report.as_json()
    assert (shown["missed"], shown["required"], len(shown["rows"]), len(shown["stretch"])) == (3, 4, 4, 1)
    assert shown["runs"][shown["rows"][0]["runs"][0]]["kind"] == "prediction"
    assert "3 of 4 required rows missed, of which 1 were not run" in in_words(report)
    assert "ValueError: no" in in_words(report)


def test_the_list_of_rows_is_fixed_and_names_are_unique() -> None:
    rows = paper_rows("all", traces=True)
    assert [one.name for one in rows] == [one.name for one in paper_rows("all", traces=True)]
    assert len({one.name for one in rows}) == len(rows)
    families = {one.name.split(".")[0] for one in rows if not one.stretch}
    assert families >= {
        "prediction", "hits", "eviction", "pool", "ordering", "fig5", "ttft", "longest", "within5s", "speed", "tbt", "fig15",
        "fig13", "narrow", "overload", "false_rejects", "false_accepts", "switching", "ssd", "simulator",
    }  # fmt: skip


def test_rows_that_are_not_asked_for_count_as_missed(tmp_path: Path) -> None:
    told: list[str] = []
    report = run_suite(traces=None, subset="ci", only=["small.prediction"], folder=tmp_path, processes=1, tell=told.append)
    verdicts = {one.row.name: one.verdict for one in report.judged}
    assert verdicts.pop("small.prediction") == "met"
    assert set(verdicts.values()) == {"skipped"}
    assert report.missed == len(verdicts)
    assert json.loads((tmp_path / "suite.json").read_text())["missed"] == report.missed
    run_suite(traces=None, subset="ci", only=["small.prediction"], folder=tmp_path, processes=1, tell=told.append)
    assert "1 of 1 runs are finished already" in told


def test_a_pattern_that_names_no_row_is_told() -> None:
    with pytest.raises(ConfigError, match=r"only: 'tfft\.\*' names no row; rows begin with small"):
        run_suite(traces=None, subset="ci", only=["tfft.*"])


def test_the_whole_suite_wants_the_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give their folder, or --subset ci"):
        run_suite(traces=None)
    lru = ["small.lru.synthetic.1M"]
    report = run_suite(traces=tmp_path, subset="ci", only=lru, processes=1)
    assert "has no synthetic_trace.jsonl.gz" in in_words(report, shown=("failed",))


def test_a_finished_run_is_found_by_its_settings_and_the_code_that_made_it(tmp_path: Path) -> None:
    run = CacheRun(workload=Workload(trace="made", first=10), eviction="lru", tokens=1_000)
    Finished(tmp_path, "one").put(run, {"hit_rate": 0.25, "nothing": float("nan")})
    assert Finished(tmp_path, "one").get(run) == {"hit_rate": 0.25}
    assert Finished(tmp_path, "two").get(run) is None
    assert Finished(tmp_path, "one").get(run.model_copy(update={"tokens": 1_001})) is None
    assert Finished(None, "one").get(run) is None


def test_half_a_file_is_no_finished_run(tmp_path: Path) -> None:
    finished = Finished(tmp_path, "one")
    finished.put(RUN, {"worst": 0.1})
    (file,) = (tmp_path / "runs").glob("*.json")
    for content in ("", "[]", '{"figures": {"worst": "x"}}', file.read_text()[:20]):
        file.write_text(content)
        assert finished.get(RUN) is None


def test_the_code_version_follows_sources_that_decide_and_no_others(tmp_path: Path) -> None:
    rows, pool = tmp_path / "sim" / "suite" / "rows" / "row.py", tmp_path / "kvstore" / "pool.py"
    for path in (rows, pool):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    before = code_version(tmp_path)
    rows.write_text("2")
    assert code_version(tmp_path) == before
    pool.write_text("2")
    assert code_version(tmp_path) != before
