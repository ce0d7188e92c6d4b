from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from moonpool.bench.local_cluster import BOTH, local_cluster
from moonpool.bench.tiny_model import make_tiny_model
from moonpool.core.errors import ConfigError

pytestmark = pytest.mark.processes

CHILD = """
import sys, threading
from pathlib import Path
from moonpool.bench.local_cluster import BOTH, local_cluster
with local_cluster(BOTH, Path(sys.argv[1]), {"store.pool_bytes": "64MiB", "engine.threads": "1"}) as cluster:
    print(cluster.url, flush=True)
    threading.Event().wait()
"""


def test_a_terminated_measurement_takes_its_cluster_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(make_tiny_model(tmp_path))], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            assert json.load(answer)["data"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/v1/models")


def test_a_cluster_that_does_not_start_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not start"):
        with local_cluster(BOTH, tmp_path / "no-such-model", {}):
            pass
