"""Clusters shared by the process tests of one session, each started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import LAPTOP, SPLIT, LocalCluster, running
from support.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(model_dir: Path) -> Iterator[Oracle]:
    oracle = Oracle(model_dir)
    yield oracle
    oracle.comparison.allow()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.workers import make_tiny_model  # with torch, which not every run needs

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    """Role both, fp32, every freed page and slot poisoned."""
    folder = tmp_path_factory.mktemp("laptop")
    with running(LocalCluster(folder, model_dir, LAPTOP, model__dtype="float32", engine__poison=True)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    """Two nodes, two prefill workers and a decode worker, fp32, every freed page and slot poisoned."""
    folder = tmp_path_factory.mktemp("split")
    with running(LocalCluster(folder, model_dir, SPLIT, model__dtype="float32", engine__poison=True)) as cluster:
        yield cluster
