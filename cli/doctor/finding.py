"""Findings, and checks that take their own time and no more."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from moonpool.core.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.core.config import Config


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``fix`` is empty for ok."""

    grade: Grade
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    return Finding(Grade.OK, what)


def warn(what: str, fix: str) -> Finding:
    return Finding(Grade.WARN, what, fix)


def fail(what: str, fix: str) -> Finding:
    return Finding(Grade.FAIL, what, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """``look`` may block, and may never come back: after ``limit_s`` that is what is found. ``late`` is its fix then."""

    name: str
    look: Callable[[Config], Iterable[Finding]]
    limit_s: float = 10.0
    late: str = "find out what hangs there; the other findings hold without it"


@dataclass(frozen=True, slots=True)
class Found:
    """What one check found, and the seconds it took."""

    check: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        return any(finding.grade is Grade.FAIL for finding in self.findings)


def run_checks(checks: Sequence[Check], config: Config, clock: Callable[[], float] = time.monotonic) -> Iterator[Found]:
    """All at once, told in their order. A check that hangs costs its own limit, and its thread is left behind."""
    begun = [(check, clock(), _start(check, config)) for check in checks]
    for check, at, answer in begun:
        try:
            findings = answer.get(timeout=max(check.limit_s - (clock() - at), 0.001))
        except queue.Empty:
            findings = (fail(f"{check.name}: no answer within {check.limit_s:.0f} s", check.late),)
        yield Found(check.name, findings, clock() - at)


def _start(check: Check, config: Config) -> queue.SimpleQueue[tuple[Finding, ...]]:
    answer: queue.SimpleQueue[tuple[Finding, ...]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_look(check, config)), name=f"doctor {check.name}", daemon=True).start()
    return answer


def _look(check: Check, config: Config) -> tuple[Finding, ...]:
    try:
        return tuple(check.look(config))
    except ConfigError as e:
        told, _, fix = e.message.rpartition("; ")
        return (fail(told or e.message, fix if told else "mend that value"),)
    except Exception as e:  # noqa: BLE001  one check that fails must not hide the others
        return (warn(f"{check.name}: cannot look: {type(e).__name__}: {e}", "look yourself; the other findings hold"),)
