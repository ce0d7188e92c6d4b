"""Tests of what only a GPU can show. ``TRITON_INTERPRET=0 pytest tests/gpu``; they are skipped, with the reason, elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.gpu import trouble

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = trouble() if mine else None
    if reason is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
