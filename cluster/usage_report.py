"""Sums of a usage log: lines in, totals by tenant, model or day out. Pure but for reading files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError
from moonpool.core.parsing import read_json

GROUPS = ("tenant", "model", "day", "endpoint", "outcome", "gateway")
DAY_CHARS = len("2026-11-30")
LINE_CHARS = 1 << 16  # what is longer is no line of a gateway's
MOST = 1 << 53  # tokens or milliseconds of one request: sums stay exact, and can be shown


@dataclass(slots=True)
class Totals:
    """``answered``: by a whole answer. ``refused``: before anything came of it, of whatever reason."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 0
    attempts: int = 0
    first_tokens: int = 0
    ttft_ms: float = 0.0  # of all first tokens together
    duration_ms: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        self.requests += 1
        self.answered += line["outcome"] == "ok"
        self.refused += line["outcome"] != "ok" and not line["completion_tokens"]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "choices", "attempts", "duration_ms"):
            setattr(self, name, getattr(self, name) + line[name])
        if line["ttft_ms"] is not None:
            self.first_tokens += 1
            self.ttft_ms += line["ttft_ms"]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        ttft, first = values.pop("ttft_ms"), values.pop("first_tokens")
        values["mean_ttft_ms"] = round(ttft / first, 3) if first else None
        values["duration_ms"] = round(values["duration_ms"], 3)
        return values


@dataclass(frozen=True, slots=True)
class Report:
    """``unreadable`` lines are none that a gateway writes whole: half a line after a crash, or of something else."""

    by: tuple[str, ...]
    groups: dict[tuple[str, ...], Totals]
    total: Totals
    unreadable: int


def report(lines: Iterable[str], by: Sequence[str]) -> Report:
    """``by``: names in ``GROUPS``. Equal groups come together, in the order of their names."""
    groups: dict[tuple[str, ...], Totals] = {}
    total, unreadable = Totals(), 0
    for text in lines:
        line = _line(text)
        if line is None:
            unreadable += bool(text.strip())
            continue
        group = tuple(line["time"][:DAY_CHARS] if name == "day" else line[name] for name in by)
        groups.setdefault(group, Totals()).add(line)
        total.add(line)
    return Report(tuple(by), dict(sorted(groups.items())), total, unreadable)


def lines_of(path: Path) -> Iterator[str]:
    """Of the log and of the full ones beside it, oldest first. ConfigError where there is none, or it cannot be read."""
    files = [*sorted(_full(path), key=lambda one: -int(one.suffix[1:])), *([path] if path.exists() else [])]
    if not files:
        raise ConfigError(f"FILE: there is no usage log {path}; set gateway.usage_log, or name another file", param="FILE")
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="replace") as f:
                while line := f.readline(LINE_CHARS):
                    yield line
        except FileNotFoundError:  # begun anew meanwhile
            continue
        except OSError as e:
            raise ConfigError(f"FILE: cannot read {file}: {e.strerror}", param="FILE") from e


def _full(path: Path) -> list[Path]:
    return [one for one in path.parent.glob(f"{path.name}.*") if one.suffix[1:].isdecimal() and one.stem == path.name]


_TEXTS = ("time", "tenant", "model", "endpoint", "outcome", "gateway")
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "choices", "attempts")


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = read_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    good = (
        all(_is_word(line.get(name)) for name in _TEXTS)
        and all(type(line.get(name)) is int and _is_amount(line[name]) for name in _COUNTS)
        and _is_amount(line.get("duration_ms"))
        and (line.get("ttft_ms", "") is None or _is_amount(line.get("ttft_ms")))
    )
    return line if good else None


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST  # type: ignore[operator]  # not where it is NaN
