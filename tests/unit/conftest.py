"""A tiny random model that every room can load in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.workers import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
