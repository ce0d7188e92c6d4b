"""A tiny random model that every room can load in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.workers import make_tiny_model  # with torch, which not every run needs

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
