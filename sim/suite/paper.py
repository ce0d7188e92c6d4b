"""The whole comparison with the paper: runs what is wanted, judges every row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import moonpool
from moonpool.core.errors import ConfigError
from moonpool.sim.suite import published
from moonpool.sim.suite.contenders import TUNING_SEED
from moonpool.sim.suite.finished import Figures, Finished, code_version
from moonpool.sim.suite.perform import perform
from moonpool.sim.suite.report import Report, in_words, judge
from moonpool.sim.suite.rows.cache import cache_rows
from moonpool.sim.suite.rows.placement import placement_rows
from moonpool.sim.suite.rows.row import Row
from moonpool.sim.suite.rows.serving import serving_rows
from moonpool.sim.suite.rows.small import small_rows
from moonpool.sim.suite.rows.tiers import tier_rows
from moonpool.sim.suite.rows.tuning import tuning_rows
from moonpool.sim.suite.settings import AnyRun, digest
from moonpool.sim.suite.workload import MADE

Subset = Literal["all", "ci", "tuning"]


def paper_rows(subset: Subset, *, traces: bool) -> list[Row]:
    """The list of rows: fixed, whatever is asked for. Without traces only the subset ``ci`` has any that can run."""
    if subset == "ci":
        return list(small_rows(traces=traces))
    if subset == "tuning":
        return list(tuning_rows())
    return [*cache_rows(), *placement_rows(), *serving_rows(), *tier_rows()]


def run_suite(
    *,
    traces: Path | None,
    subset: Subset = "all",
    only: Sequence[str] = (),
    folder: Path | None = None,
    processes: int = 2,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """``only``: names or patterns (``ttft.*``) of rows; the others count as missed. ``folder`` keeps finished runs and the
    report. ConfigError for a pattern that names no row, and where traces are wanted."""
    if traces is None and subset != "ci":
        raise ConfigError("traces: the suite replays the public traces; give their folder, or --subset ci", param="traces")
    rows = paper_rows(subset, traces=traces is not None)
    wanted = _wanted(rows, only)
    code = code_version(Path(moonpool.__file__).parent)
    outcomes = _outcomes(wanted, traces, Finished(folder, code), code, processes, tell)
    report = Report(tuple(judge(row, outcomes, code) for row in rows), code, constants())
    if folder is not None:
        _write(report, folder)
    return report


def constants() -> dict[str, Any]:
    """What all runs share; each run's own settings are with it."""
    return {
        "prefill": published.PREFILL,
        "decode": published.DECODE,
        "kv_bytes_per_token": published.KV_BYTES_PER_TOKEN,
        "block_tokens": published.BLOCK_TOKENS,
        "tuning_seed": TUNING_SEED,
        "made": {name: getattr(MADE, name) for name in MADE.__slots__},
    }


def _wanted(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    for pattern in only:
        if not any(_names(pattern, row) for row in rows):
            known = ", ".join(dict.fromkeys(row.name.split(".")[0] for row in rows))
            raise ConfigError(f"only: {pattern!r} names no row; rows begin with {known}", param="only")
    return [row for row in rows if not only or any(_names(pattern, row) for pattern in only)]


def _names(pattern: str, row: Row) -> bool:
    return row.name == pattern or row.name.startswith(f"{pattern}.") or fnmatchcase(row.name, pattern)


def _outcomes(
    rows: Sequence[Row], traces: Path | None, finished: Finished, code: str, processes: int, tell: Callable[[str], None]
) -> dict[str, Figures | str]:
    runs: dict[str, AnyRun] = {digest(run, code): run for row in rows for run in row.runs}
    begun = time.monotonic()
    outcomes = {
        digest(run, code): answer
        for run, answer in perform(list(runs.values()), traces, finished=finished, processes=processes, tell=tell)
    }
    tell(f"{len(runs)} runs in {time.monotonic() - begun:.0f} s")
    return outcomes


def _write(report: Report, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "suite.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
        (folder / "suite.txt").write_text(in_words(report) + "\n")
    except OSError as e:
        raise ConfigError(f"output: cannot write to {folder}: {e.strerror}; give a writable folder", param="output") from e
