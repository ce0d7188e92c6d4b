"""Clients that make load or score models: what they count agrees with what the cluster did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import client_commands as commands
from support.client_commands import PAGE, Places
from support.clients import ROOT, Client
from support.clients_page import Notebook
from support.cluster import LocalCluster

AIPERF = (" avg ", "Time to First Token", "Request Latency", "Inter Token Latency", "Sequence Length", "Request Count")

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.timeout(1800)]


def moonpool(command: Sequence[str]) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "moonpool.cli.main", *command[1:]), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
    return done.stdout


def tables(out: str, *telling: str) -> str:
    """The lines of its tables that hold one of ``telling``."""
    lines = [line.strip() for line in out.splitlines()]
    return "\n".join(line for line in lines if line[:1] in ("│", "┃", "|") and any(word in line for word in telling))


def answered(cluster: LocalCluster) -> float:
    """Completions that the gateway has answered whole."""
    page = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    lines = [line for line in page.splitlines() if line.startswith("moonpool_gateway_requests_total")]
    return sum(float(line.split()[-1]) for line in lines if 'endpoint="completions"' in line and 'outcome="ok"' in line)


@pytest.fixture(scope="session")
def trace(at: Places) -> list[dict[str, Any]]:
    """The rows of the one trace that everybody replays."""
    moonpool(commands.moonpool_trace(at))
    return [json.loads(line) for line in Path(at.trace).read_text().splitlines()]


@pytest.mark.clients("lm-eval")
def test_lm_eval_scores_choices_and_answers_as_the_model_itself_would(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook, model_dir: Path
) -> None:
    out = client.run(commands.lm_eval(at), scratch, limit_s=600)
    notebook.add("lm-eval", commands.lm_eval(PAGE), out)
    folder = scratch / "lm-eval"
    (results,) = [json.loads(path.read_text())["results"] for path in folder.rglob("results_*.json")]
    assert {"moonpool_choices", "moonpool_answers"} <= set(results)
    scored = read_samples(folder, "moonpool_choices")
    assert len(scored) == 6 and len(read_samples(folder, "moonpool_answers")) == 6
    check_scores(scored, model_dir)
    cluster.assert_idle()


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_scores(samples: list[dict[str, Any]], model_dir: Path) -> None:
    """Every log-likelihood is that of the library's own forward pass."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for sample in samples:
        for choice, answer in enumerate(sample["doc"]["choices"]):
            context = f"The capital of {sample['doc']['country']} is"
            before = len(tokenizer(context, add_special_tokens=False).input_ids)
            ids = tokenizer(f"{context} {answer}", add_special_tokens=False).input_ids
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            want = sum(float(logprobs[i - 1, ids[i]]) for i in range(before, len(ids)))
            got = float(sample["filtered_resps"][choice][0])
            assert got == pytest.approx(want, abs=2e-3), f"{context} {answer}"


@pytest.mark.clients("aiperf")
def test_aiperf_measures_prompts_of_its_own(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook, hub: Path
) -> None:
    out = client.run(commands.aiperf_synthetic(at), scratch, limit_s=400, HF_HUB_CACHE=str(hub))
    notebook.add("aiperf", commands.aiperf_synthetic(PAGE), tables(out.rpartition("LLM Metrics")[2], *AIPERF))
    found = aiperf_figures(scratch / "aiperf-synthetic")
    assert found["request_count"]["avg"] == 8
    assert found["output_sequence_length"]["avg"] == 12
    cluster.assert_idle()


@pytest.mark.clients("aiperf")
def test_aiperf_and_our_own_replay_send_the_same_requests_of_one_trace(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook, hub: Path, trace: list[dict[str, Any]]
) -> None:
    out = client.run(commands.aiperf_replay(at), scratch, limit_s=600, HF_HUB_CACHE=str(hub))
    notebook.add("aiperf", commands.moonpool_trace(PAGE), at.trace)
    notebook.add("aiperf", commands.aiperf_replay(PAGE), tables(out.rpartition("LLM Metrics")[2], *AIPERF))
    theirs = aiperf_figures(scratch / "aiperf-replay")
    said = moonpool(commands.moonpool_replay(at))
    notebook.add("aiperf", commands.moonpool_replay(PAGE), said)
    ours = json.loads((scratch / "moonpool-replay/summary.json").read_text())
    assert theirs["request_count"]["avg"] == ours["ok"] == len(trace)
    cluster.assert_idle()


def aiperf_figures(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "profile_export_aiperf.json").read_text()))


@pytest.mark.clients("guidellm")
def test_guidellm_keeps_a_constant_rate(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook
) -> None:
    out = client.run(commands.guidellm_constant(at), scratch, limit_s=400)
    notebook.add("guidellm", commands.guidellm_constant(PAGE), tables(out, "Comp", "TTFT", "constant@"))
    assert guidellm_totals(scratch / "guidellm-constant.json") == {"successful": 8, "errored": 0}
    cluster.assert_idle()


@pytest.mark.clients("guidellm")
def test_guidellm_replays_a_trace_in_mooncakes_format(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook, trace: list[dict[str, Any]]
) -> None:
    before = answered(cluster)
    out = client.run(commands.guidellm_replay(at), scratch, limit_s=600)
    notebook.add("guidellm", commands.guidellm_replay(PAGE), tables(out, "Comp", "TTFT", "trace@"))
    assert answered(cluster) - before == len(trace)
    totals = guidellm_totals(scratch / "guidellm-replay.json")
    assert totals["errored"] == 0
    assert totals["successful"] in (len(trace), len(trace) - 1), "its report may leave out the last row of a trace"
    cluster.assert_idle()


def guidellm_totals(path: Path) -> dict[str, int]:
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return {name: totals[name] for name in ("successful", "errored")}


@pytest.mark.clients("vllm")
def test_the_bench_of_vllm_runs_against_the_gateway(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook
) -> None:
    out = client.run(commands.vllm_bench(at), scratch, limit_s=600)
    notebook.add("vllm", commands.vllm_bench(PAGE), out.rpartition("Serving Benchmark Result")[2].partition("\n")[2])
    found = json.loads((scratch / "vllm-bench.json").read_text())
    assert found["completed"] == 8 and found["total_output_tokens"] == 8 * 12
    cluster.assert_idle()
