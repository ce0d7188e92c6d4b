"""Shared fixtures. UCX and Triton read their environment once, at their first import: it is set here, before that."""

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
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; tests/gpu is run with 0

BEGUN_FIRST = (  # files that take long: none of them may be what the last worker of xdist is still at
    "test_greedy_parity.py",
    "test_suite_command.py",
    "test_bench_handoff.py",
    "test_local_cluster.py",
    "test_fuzzed_http.py",
    "test_etcd_outages.py",
    "test_ray_launcher.py",
    "test_console_routes.py",
    "test_bfloat16_bound.py",
    "test_ucx_faults.py",
)


def pytest_configure(config: pytest.Config) -> None:
    channels.keep_polling()  # some tests make channels and servers by themselves, and failed ones abandon their calls
    config.pluginmanager.register(Bounds(config), "bounds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(BEGUN_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """A bf16 SmolLM2-135M-Instruct directory: MOONPOOL_TEST_MODEL, or fetched once into the user's cache."""
    given = os.environ.get("MOONPOOL_TEST_MODEL")
    if given:
        return Path(given)
    from moonpool.engine.models import resolve_model

    return resolve_model("smollm2", Path.home() / ".cache/moonpool/models", print)
