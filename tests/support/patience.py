"""Loads that are waited for: models as small as those of tests compute faster than a disk or a busy machine answers."""

from __future__ import annotations

import pytest

from moonpool.prefill_worker import incoming, pace

PATIENT_S = 10.0


def wait_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load is cut short for taking longer than computing would, and none is late."""
    monkeypatch.setattr(pace, "MIN_MS", int(1e3 * PATIENT_S))
    monkeypatch.setattr(incoming, "patience_s", lambda expected_s, computing_s: PATIENT_S)
