"""A running gateway in front of a scripted cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.gateway_front import Front, front
from support.tiny_tokenizer import write_tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def tiny(tiny_dir: Path) -> AsyncIterator[Front]:
    async with front(tiny_dir) as running:
        yield running
