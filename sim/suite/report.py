"""What became of every row: a verdict each, a table, one JSON value.

The list of rows is fixed in code, and all of it is judged: a row whose runs failed, or that was not asked for, has missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moonpool.sim.suite.rows.row import Figures, Row
from moonpool.sim.suite.settings import digest

Verdict = Literal["met", "missed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Judged:
    row: Row
    verdict: Verdict
    value: float | None = None
    beside: tuple[tuple[str, float], ...] = ()
    why: str = ""  # of a failure


@dataclass(frozen=True, slots=True)
class Report:
    judged: tuple[Judged, ...]
    code: str
    constants: Mapping[str, Any]

    @property
    def missed(self) -> int:
        """Required rows that are not met, for whatever reason."""
        return sum(one.verdict != "met" for one in self.judged if not one.row.stretch)

    def as_json(self) -> dict[str, Any]:
        return {
            "missed": self.missed,
            "required": sum(not one.row.stretch for one in self.judged),
            "skipped": sum(one.verdict == "skipped" for one in self.judged),
            "code": self.code,
            "constants": dict(self.constants),
            "rows": [self._row(one) for one in self.judged if not one.row.stretch],
            "stretch": [self._row(one) for one in self.judged if one.row.stretch],
            "runs": self._runs(),
        }

    def _row(self, one: Judged) -> dict[str, Any]:
        row = one.row
        return {
            "name": row.name,
            "what": row.what,
            "reference": row.reference,
            "ours": one.value,
            "target": {"least": row.target.least, "most": row.target.most},
            "verdict": one.verdict,
            "beside": dict(one.beside),
            "why": one.why,
            "runs": [digest(run, self.code) for run in row.runs],
        }

    def _runs(self) -> dict[str, Any]:
        """Settings of every run, by the digest that rows name it by."""
        return {digest(run, self.code): run.model_dump(mode="json") for one in self.judged for run in one.row.runs}


def judge(row: Row, outcomes: Mapping[str, Figures | str], code: str) -> Judged:
    """``outcomes``: figures, or why there are none, by the digest of the run. Runs without any were skipped."""
    found = [outcomes.get(digest(run, code)) for run in row.runs]
    failed = [one for one in found if isinstance(one, str)]
    if failed:
        return Judged(row, "failed", why=failed[0])
    figures = [one for one in found if one is not None and not isinstance(one, str)]
    if len(figures) < len(row.runs):
        return Judged(row, "skipped")
    try:
        value = float(row.value(figures))
        beside = tuple((name, float(make(figures))) for name, make in row.beside)
    except (KeyError, ZeroDivisionError) as e:
        return Judged(row, "failed", why=f"the runs give no figure: {type(e).__name__} {e}")
    if not math.isfinite(value):
        return Judged(row, "failed", why=f"the figure is {value}")
    return Judged(row, "met" if row.target.met(value) else "missed", value, beside)


def in_words(report: Report, *, shown: Sequence[Verdict] = ("met", "missed", "failed")) -> str:
    """The table: row, reference, ours, target, verdict. Stretch rows last."""
    lines = []
    for stretch in (False, True):
        rows = [one for one in report.judged if one.row.stretch is stretch and one.verdict in shown]
        if rows:
            lines += ["stretch" if stretch else "required", *_table(rows), ""]
    required = [one for one in report.judged if not one.row.stretch]
    skipped = sum(one.verdict == "skipped" for one in required)
    note = f", of which {skipped} were not run" if skipped else ""
    lines.append(f"{report.missed} of {len(required)} required rows missed{note}")
    return "\n".join(lines)


def _table(rows: Sequence[Judged]) -> list[str]:
    cells = [("row", "reference", "ours", "target", "")]
    cells += [(one.row.name, one.row.reference, _number(one.value), str(one.row.target), _verdict(one)) for one in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    return ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in cells]


def _verdict(one: Judged) -> str:
    return f"{one.verdict}: {one.why}" if one.why else one.verdict


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
