"""One live cluster for all clients of a session: the bundled model in split mode, on this machine's loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client_commands import PAGE, Places
from support.clients import Client, find, lacking, lay_out_hub, pins
from support.clients_page import Notebook
from support.cluster import LocalCluster, running

RECORDS = "CLIENTS_RECORDS"
NODES = [{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("clients")
        if marker is not None and find(marker.args[0]) is None:
            item.add_marker(pytest.mark.skip(lacking(marker.args[0])))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    """fp32, so that an answer does not depend on what else runs."""
    folder = tmp_path_factory.mktemp("clients")
    with running(LocalCluster(folder, model_dir, NODES, model__dtype="float32")) as cluster:
        yield cluster


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Client:
    """The one that the test is marked with, of the version that is pinned."""
    marker = request.node.get_closest_marker("clients")
    assert marker is not None
    found = find(marker.args[0])
    assert found is not None
    assert found.version() == pins()[found.name], "not the pinned version: scripts/clients makes it anew"
    return found


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="session")
def at(cluster: LocalCluster, scratch: Path, model_dir: Path) -> Places:
    return Places(cluster.url, str(model_dir), str(scratch), str(scratch / "trace.jsonl"))


@pytest.fixture(scope="session")
def hub(scratch: Path, model_dir: Path) -> Path:
    """A hub's cache with the tokenizer as ``local/smollm2``."""
    lay_out_hub(model_dir, scratch / "hub", "smollm2")
    return scratch / "hub"


@pytest.fixture(scope="session")
def notebook(at: Places) -> Notebook:
    given = os.environ.get(RECORDS)
    names = {
        at.url: PAGE.url,
        at.url.removeprefix("http://"): PAGE.url.removeprefix("http://"),
        at.out: PAGE.out,
        at.model: PAGE.model,
    }
    return Notebook(Path(given) if given else None, names)
