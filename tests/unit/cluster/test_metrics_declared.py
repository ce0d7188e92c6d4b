"""What the code declares is what dashboards, alerts and pages name, and what gateways really count."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.store import Roll, config, store_node

from moonpool.cluster.gateway.metrics import Metrics
from moonpool.cluster.gateway.tenants.usage import TenantUsage
from moonpool.cluster.probe.catalogue.declared import DECLARED, TOLD_OTHERWISE, metrics, numbers_of, series_names
from moonpool.cluster.probe.catalogue.metric import Kind
from moonpool.cluster.probe.catalogue.of_gateway import COUNTED
from moonpool.cluster.probe.catalogue.page import with_tables
from moonpool.cluster.probe.catalogue.steps import STEPS
from moonpool.core.ids import Role

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "moonpool.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ALERT_TESTS = ROOT / "deploy" / "prometheus" / "alerts_test.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
NAME = re.compile(r"\bmoonpool_[a-z0-9_]+")
SELECTED = re.compile(r"\b(moonpool_[a-z0-9_]+)\{([^}]*)\}")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is asked of Prometheus."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']!r}", target["expr"]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        yield f"variable {variable['name']!r}", str(variable["query"])
    for rule in rules():
        yield str(rule.get("alert") or rule["record"]), rule["expr"]


def test_dashboard_and_alerts_name_only_series_that_the_code_declares() -> None:
    unknown = {(where, name) for where, text in expressions() for name in NAME.findall(text) if name not in series_names()}
    assert not unknown
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for _, text in expressions() for name in re.findall(r"\bmoonpool:[a-z0-9_:]+", text)}
    assert used <= recorded


def test_dashboard_and_alerts_select_only_labels_and_values_that_the_code_declares() -> None:
    of = {name: metric for part, metric in metrics() for name in metric.series(part)}
    wrong = []
    for where, text in expressions():
        for name, selector in SELECTED.findall(text):
            known = {*of[name].labels, "cluster", "instance", "le"}
            for label, _, value in re.findall(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"", selector):
                closed = of[name].numbers if of[name].labels[:1] == (label,) else None
                if label not in known or (closed is not None and not set(value.split("|")) <= closed.keys()):
                    wrong.append((where, name, label, value))
    assert not wrong


def test_every_alert_has_its_section_its_severity_and_a_test() -> None:
    sections = set(re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert sections == alerts.keys()
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["annotations"]["runbook_url"].endswith(f"docs/runbook.md#{name.lower()}"), name
    for section in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        assert all(f"\n{word}: " in section for word in ("Means", "Look", "Mend")), section[:40]
    assert {test["name"] for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]} == alerts.keys()


def test_the_page_of_metrics_lists_what_the_code_declares() -> None:
    text = METRICS_PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "python -m moonpool.cluster.probe.catalogue.page docs/metrics.md"


def test_the_page_of_metrics_lists_the_steps_of_each_part() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (`[^|]*) \|$", METRICS_PAGE.read_text(), re.MULTILINE))
    told = {part: re.findall(r"`(\w+)`", steps) for part, steps in rows.items()}
    for role, steps in STEPS.items():
        assert told[role.value] == [step.name for step in steps]


def test_pages_and_manifests_name_only_metrics_that_there_are() -> None:
    whole = {metric.full_name(part) for part, metric in metrics()} | series_names()
    parts = re.compile(rf"\bmoonpool_(?:{'|'.join(DECLARED)})_[a-z0-9_]*[a-z0-9]")
    for path in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*")):
        if path.is_file() and path.suffix in (".md", ".yaml", ".yml", ".json", ".tpl", ".txt"):
            assert set(parts.findall(path.read_text(encoding="utf-8"))) <= whole, path.relative_to(ROOT)


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.full_name(part) for part, metric in metrics()]
    assert len(names) == len(set(names))
    for part, metric in metrics():
        name = metric.full_name(part)
        assert re.fullmatch(r"moonpool_[a-z0-9_]+", name)
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert not re.search(r"_(ms|us|kb|mb|mib|gib|minutes|hours)(_|$)", name), name
        assert metric.text and not metric.text.endswith("."), name
        if metric.kind is Kind.HISTOGRAM:
            assert list(metric.buckets) == sorted(metric.buckets) and metric.buckets, name
    for part, some in DECLARED.items():
        numbers = [number for metric in some for number in (metric.numbers or {}).values()]
        assert len(numbers) == len(set(numbers)), f"{part}: a number is told twice"
        assert numbers_of(part) == set(numbers)


def test_gateways_count_what_is_declared_of_them() -> None:
    made = Metrics(["tiny"])
    TenantUsage(made.registry)
    families = {family.name: family for family in made.registry.collect()}
    declared = {metric.full_name("gateway").removesuffix("_total"): metric for metric in COUNTED}
    assert families.keys() == declared.keys()
    for name, metric in declared.items():
        assert (families[name].type, families[name].documentation) == (metric.kind.value, metric.text)
    labels = {sample.name: set(sample.labels) - {"le"} for family in families.values() for sample in family.samples}
    for metric in COUNTED:
        for series in metric.series("gateway"):
            assert labels.get(series, set(metric.labels)) == set(metric.labels), series


@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.BOTH,)])
def test_every_role_has_its_part(role: Role) -> None:
    assert role.value in DECLARED


def test_a_series_is_there_before_anything_happened() -> None:
    text = Metrics(["tiny"]).page("")[0].decode()
    told = {(sample.name, *sorted(sample.labels.items())) for family in parse_text(text) for sample in family.samples}
    for result in ("met", "missed", "refused", "failed"):
        assert ("moonpool_gateway_targeted_requests_total", ("model", "tiny"), ("result", result)) in told
    assert ("moonpool_gateway_refusals_total", ("model", "tiny"), ("reason", "no_path")) in told
    assert ("moonpool_gateway_itl_seconds_count", ("model", "tiny")) in told


async def test_all_that_a_store_node_with_every_tier_says_is_declared(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    made = config(tmp_path, slots=8)
    tiers = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 16 << 20, "shared_path": str(tmp_path / "shared")}
    async with store_node(made.model_copy(update={"store": made.store.model_copy(update=tiers)}), Roll()) as node:
        said = node.numbers().keys()
        assert said <= numbers_of("store") | TOLD_OTHERWISE
        assert {"ssd_bytes", "shared_readable", "library_clients"} <= said, "all parts speak"


def test_the_dashboard_has_a_row_for_each_part_and_no_two_panels_in_one_place() -> None:
    board = json.loads(DASHBOARD.read_text())
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Users", "Conductor", "Prefill", "Decode", "Pool and tiers", "Transfer", "Processes"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({panel["title"] for panel in panels()}) == len(panels())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not mine & cells, panel["title"]
        cells |= mine
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels() for target in panel["targets"])
