"""aiperf and ``moonpool replay`` measure the same: time to the first token of one trace, in alternating pairs of runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import client_commands as commands
from support.client_commands import Places
from support.clients import ROOT, Client
from support.cluster import LocalCluster

PAIRS = 3
WITHIN = 0.15  # of the larger of the two medians
LEAN = ("--workers-max", "1", "--no-gpu-telemetry", "--no-server-metrics")  # it shares its cores with the cluster

pytestmark = [
    pytest.mark.model,
    pytest.mark.processes,
    pytest.mark.timeout(3000),
    pytest.mark.skipif("CLIENTS_PAIRS" not in os.environ, reason="measures: CLIENTS_PAIRS=1 on a quiet machine"),
]


def moonpool(*words: str) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "moonpool.cli.main", *words), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"


def forget(cluster: LocalCluster) -> None:
    """All KV, so that every run meets a cold cluster."""
    assert cluster.state is not None
    cluster.assert_idle()
    cluster.clear_device_pages("prefill-0", "decode-0")
    moonpool("store", "clear", "--everything", "--yes", "--set", f"cluster.registry={cluster.state.registry}")


@pytest.mark.clients("aiperf")
def test_the_median_time_to_the_first_token_agrees(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, hub: Path
) -> None:
    moonpool(*commands.moonpool_trace(at)[1:])
    rows = len(Path(at.trace).read_text().splitlines())

    def theirs(run: str) -> tuple[float, float]:
        client.run([*commands.aiperf_replay(at, run), *LEAN], scratch, limit_s=600, HF_HUB_CACHE=str(hub))
        found = json.loads((scratch / run / "profile_export_aiperf.json").read_text())
        return found["request_count"]["avg"], found["time_to_first_token"]["p50"]

    def ours(run: str) -> tuple[float, float]:
        moonpool(*commands.moonpool_replay(at, run)[1:])
        lines = (scratch / run / "requests.jsonl").read_text().splitlines()
        times = [one["ttft_ms"] for one in map(json.loads, lines) if one["outcome"] == "ok"]
        return len(times), statistics.median(times)  # between the middle two, as aiperf has it

    sides: dict[str, Callable[[str], tuple[float, float]]] = {"moonpool": ours, "aiperf": theirs}
    measured: dict[str, list[float]] = {name: [] for name in sides}
    ours("warm-up")
    for pair in range(PAIRS):
        for name in sorted(sides, reverse=pair % 2 == 1):
            forget(cluster)
            count, p50 = sides[name](f"{name}-{pair}")
            assert count == rows
            measured[name].append(round(p50))
            print(f"pair {pair}: {name} {p50:.0f} ms", flush=True)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    assert abs(medians["aiperf"] - medians["moonpool"]) <= WITHIN * max(medians.values()), measured
