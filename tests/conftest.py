"""Shared fixtures. UCX reads its environment once, at the first import: it is set here, before any test imports it."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from support.bounds import Bounds

from moonpool.wire import channels

hypothesis.settings.register_profile("untimed", deadline=None)  # speed is never asserted
hypothesis.settings.load_profile("untimed")

for name, value in {"UCX_MODULES": "^ib", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error"}.items():
    os.environ.setdefault(name, value)


def pytest_configure(config: pytest.Config) -> None:
    channels.keep_polling()  # some tests make channels and servers by themselves, and failed ones abandon their calls
    config.pluginmanager.register(Bounds(config), "bounds")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """A bf16 SmolLM2-135M-Instruct directory: MOONPOOL_TEST_MODEL, or fetched once into the user's cache."""
    given = os.environ.get("MOONPOOL_TEST_MODEL")
    if given:
        return Path(given)
    from moonpool.engine.models import resolve_model

    return resolve_model("smollm2", Path.home() / ".cache/moonpool/models", print)
