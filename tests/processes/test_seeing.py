"""Operators' own tools against a running cluster: Prometheus with our dashboard and alerts, traces, logs of one request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from support.cluster import LocalCluster, complete, running
from support.observers import Collector, Prometheus, SpanSeen, prometheus, tool

from moonpool.cluster.probe.catalogue.declared import series_names
from moonpool.core.ids import Role
from moonpool.wire import pb

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "moonpool.json"
RULES = ROOT / "deploy" / "prometheus"
NODES = [{"name": "a", "prefill": 1, "decode": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
CLIENT_TRACE, CLIENT_SPAN = "5af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

ONES = {"request", "attempt 1", "conductor", "prefill", "decode", "store"}
LAST_OF_EACH = {"gateway.stream", "conductor.decide", "prefill.drain", "decode.decode", "store.hold"}

# Panels of what this cluster does not have: API keys, lower tiers, TLS, requests with targets.
WITHOUT_DATA = {
    "Tokens per second by tenant",
    "Requests per second by tenant",
    "SSD extents",
    "Certificates end in",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, collector: Collector) -> Iterator[LocalCluster]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": 16,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 32 << 20,
        "store__region_bytes": 8 << 20,
        "timing__silent_after_ms": 5_000,
        "observe__otlp_endpoint": collector.url,
    }
    with running(LocalCluster(tmp_path_factory.mktemp("seeing"), tiny_model, NODES, **settings)) as cluster:
        yield cluster


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % 128 for i in range(length)]


# -- Prometheus ------------------------------------------------------------------------------------------------------------


def asked(expression: str) -> str:
    """As Grafana asks: with the variables of the dashboard filled in."""
    filled = expression.replace("$__rate_interval", "10s").replace("$cluster", ".*").replace("$model", ".*")
    assert "$" not in filled, filled
    return filled


@pytest.fixture
def scraped(cluster: LocalCluster, tmp_path: Path) -> Iterator[Prometheus]:
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here: apt-get install prometheus, or scripts/setup --dev")
    registry = cluster.state.registry if cluster.state else ""
    command = [sys.executable, "-m", "moonpool.cli.main", "status", "--set", f"cluster.registry={registry}"]
    targets = tmp_path / "targets.json"
    subprocess.run([*command, "--prometheus-targets", str(targets)], check=True, capture_output=True)
    assert {group["labels"]["instance"] for group in json.loads(targets.read_text())} == cluster.changes().keys()
    with prometheus(tmp_path, targets, RULES / "alerts.yaml") as running:
        yield running


async def test_every_panel_and_alert_evaluates_on_a_scraped_cluster(cluster: LocalCluster, scraped: Prometheus) -> None:
    processes = len(cluster.changes())
    scraped.until(lambda: len(scraped.query("up == 1")) == processes, "not every process is scraped")
    async with cluster.client() as client:
        for seed in range(8):
            targets = {"x-ttft-target-ms": "60000", "x-tbt-target-ms": "60000"}
            answer = await complete(client, prompt(80, seed % 4), 24, headers=targets)
            assert answer.status == 200, answer.body
    answered = 'sum(moonpool_gateway_requests_total{outcome="ok"}) >= 8'
    scraped.until(lambda: scraped.query(answered), "the requests are not told")
    scraped.until(lambda: scraped.query("sum(rate(moonpool_gateway_requests_total[10s])) > 0"), "no rate")

    told = {name for name in scraped.get("label/__name__/values") if name.startswith("moonpool_")}
    assert {name for name in told if not name.endswith("_created")} <= series_names(), "declare it in cluster/probe/catalogue"

    def without() -> set[str]:
        return {panel["title"] for panel in panels() if not any(data(scraped, target) for target in panel["targets"])}

    # A rate needs two scrapes of its own process, and each is scraped at a time of its own.
    scraped.until(lambda: without() <= WITHOUT_DATA, lambda: f"no data: {without() - WITHOUT_DATA}")
    assert without() == WITHOUT_DATA

    wanted = [rule for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]

    def evaluated() -> list[dict[str, Any]] | None:
        rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
        return None if any(rule["health"] == "unknown" for rule in rules) else rules

    rules = scraped.until(evaluated, "rules are not evaluated")
    assert len(rules) == len(wanted)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert not firing, "nothing is wrong with this cluster"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def data(scraped: Prometheus, target: dict[str, Any]) -> bool:
    return bool(scraped.query(asked(target["expr"])))


def test_rules_and_their_tests_are_what_promtool_accepts(tmp_path: Path) -> None:
    promtool = tool("promtool")
    if promtool is None:
        pytest.skip("no promtool here: apt-get install prometheus, or scripts/setup --dev")
    (tmp_path / "moonpool.json").write_text("[]")
    for file in ("prometheus.yaml", "alerts.yaml", "alerts_test.yaml"):
        (tmp_path / file).write_text((RULES / file).read_text())
    for words in (
        ("check", "rules", "alerts.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ):
        done = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# -- traces ----------------------------------------------------------------------------------------------------------------


async def traced(cluster: LocalCluster, collector: Collector, **headers: str) -> list[SpanSeen]:
    async with cluster.client() as client:
        answer = await complete(client, prompt(100, 5), 12, headers=headers)
    assert answer.status == 200 and answer.headers is not None, answer.body
    request = answer.headers["x-moonpool-request-id"]

    def whole() -> list[SpanSeen]:
        """Once each process has sent what it has, in whatever batches."""
        found = collector.spans(request=request)
        steps = {span.facts.get("moonpool.step") for span in found}
        return found if {span.name for span in found} >= ONES | LAST_OF_EACH and steps >= set(range(1, 11)) else []

    spans: list[SpanSeen] = cluster.until(whole, f"not every span has come: {collector.spans(request=request)}")
    return spans


async def test_a_trace_has_the_ten_steps_nested_and_in_order(cluster: LocalCluster, collector: Collector) -> None:
    spans = await traced(cluster, collector)
    by_name = {span.name: span for span in spans}
    by_id = {span.id: span for span in spans}
    assert len(by_name) == len(by_id) == len(spans), "every span once"
    assert {span.trace for span in spans} == {by_name["request"].trace}
    steps = {span.facts["moonpool.step"] for span in spans if "moonpool.step" in span.facts}
    assert steps == set(range(1, 11))
    above = {name: by_id[span.parent].name if span.parent else "" for name, span in by_name.items()}
    assert above["request"] == ""
    assert {above[name] for name in ("attempt 1", "gateway.tokenise", "gateway.stream")} == {"request"}
    assert {above[part] for part in ("conductor", "prefill", "decode", "store")} == {"attempt 1"}
    assert all(above[name] == name.split(".")[0] for name in above if "." in name and not name.startswith("gateway."))
    order = ["gateway.tokenise", "conductor.decide", "decode.queue", "prefill.queue", "prefill.prefix", "prefill.compute"]
    begins = [by_name[name].begin_ns for name in (*order, "prefill.sample", "gateway.stream")]
    assert begins == sorted(begins), "processes of one machine have one clock"
    for part in ("gateway", "prefill", "decode", "store"):
        one = by_name["request" if part == "gateway" else part]
        for span in spans:
            if span.name.startswith(f"{part}."):
                assert one.begin_ns <= span.begin_ns <= span.end_ns <= one.end_ns, span.name
    assert by_name["decode"].facts["moonpool.prefill"] == "prefill-0"
    assert by_name["request"].facts["moonpool.output_tokens"] == 12
    assert not any(span.failed for span in spans)


async def test_a_client_s_trace_goes_on_through_the_cluster(cluster: LocalCluster, collector: Collector) -> None:
    spans = await traced(cluster, collector, traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")
    assert {span.trace for span in spans} == {CLIENT_TRACE}
    assert {span.name for span in spans if span.parent == CLIENT_SPAN} == {"request"}


# -- logs ------------------------------------------------------------------------------------------------------------------


def lines_about(cluster: LocalCluster, request: str) -> list[tuple[str, dict[str, Any]]]:
    """(member, line) of all logs, in the order of their time."""
    found = []
    for path in (cluster.folder / "state" / "logs").glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if request in line and line.startswith("{"):
                found.append((path.stem, json.loads(line)))
    return sorted(found, key=lambda one: one[1]["timestamp"])


def placed_at(cluster: LocalCluster, request: str) -> str:
    """The decode worker of its first attempt."""
    with grpc.insecure_channel(cluster.member("conductor-0").address) as channel:
        reply = pb.conductor_rpc.ConductorStub(channel).Explain(pb.conductor.ExplainRequest(request=request), timeout=5)
    return str(json.loads(reply.json)["decisions"][0]["placed"]["decode"]["id"])


async def test_a_request_that_failed_over_is_followed_by_its_id_through_all_logs(
    cluster: LocalCluster, collector: Collector
) -> None:
    workers = {name: change.member.pid for name, change in cluster.changes().items() if change.member.role is Role.DECODE}
    body = {"model": "smollm2", "prompt": prompt(40, 9), "max_tokens": 800, "temperature": 0, "stream": True}
    async with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        request = response.headers["x-moonpool-request-id"]
        for pid in workers.values():
            os.kill(pid, signal.SIGSTOP)
        struck = placed_at(cluster, request)
        os.kill(workers[struck], signal.SIGKILL)
        for name in workers.keys() - {struck}:
            os.kill(workers[name], signal.SIGCONT)
        text = (await response.aread()).decode()
    assert text.rstrip().endswith("[DONE]")

    wanted = {
        ("conductor", "placement over", 1),
        ("prefill", "prefill over", 1),
        ("gateway", "attempt failed", 1),
        ("conductor", "placement over", 2),
        ("prefill", "prefill over", 2),
        ("decode", "attempt over", 2),
        ("gateway", "request over", None),
    }

    def events() -> set[tuple[str, str, int | None]]:
        about = lines_about(cluster, request)
        return {(member.split("-")[0], line["event"], line.get("attempt")) for member, line in about}

    # Each process writes its lines by itself, some after the client has all of its answer.
    cluster.until(lambda: wanted <= events(), f"not all of {wanted}")
    told = lines_about(cluster, request)
    assert all(line["request"] == request and ("attempt" in line or line["event"] == "request over") for _, line in told)
    failed = next(line for _, line in told if line["event"] == "attempt failed")
    assert (failed["outcome"], failed["peer"], failed["decode"]) == ("peer_silent", struck, struck)
    last = next(line for _, line in told if line["event"] == "request over")
    assert (last["outcome"], last["attempts"], last["tenant"]) == ("ok", 2, "default")
    assert last["output_tokens"] == 800 and last["ttft_s"] > 0
    assert "w9" not in json.dumps([line for _, line in told]), "nothing that was asked or answered"

    def attempts() -> dict[str, SpanSeen]:
        return {one.name: one for one in collector.spans(request=request) if one.name.startswith("attempt")}

    cluster.until(lambda: attempts().keys() >= {"attempt 1", "attempt 2"}, "not both attempts were sent")
    spans = attempts()
    assert (spans["attempt 1"].failed, spans["attempt 2"].failed) == ("peer_silent", "")
