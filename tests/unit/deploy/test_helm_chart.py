"""The Helm chart: what it renders, what it refuses, and that it says what the code says.

``UPDATE_GOLDEN=1`` writes the renders in tests/golden/chart anew.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chart import CHART, GOLDEN, HOUSE, PROFILES, chart_script

helm = pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) is not installed")
SCRIPT = chart_script()
FILE = "values-{}.yaml"


def values(profile: str, **more: Any) -> dict[str, Any]:
    merged: dict[str, Any] = SCRIPT.merged(SCRIPT.values_of(FILE.format(profile)), more)
    return merged


def rendered(profile: str, *, whole: bool = True, **more: Any) -> str:
    text: str = SCRIPT.manifests(SCRIPT.render(values(profile, **more)), whole=whole)
    return text


@pytest.mark.parametrize("profile", PROFILES)
def test_a_helm_profile_renders_as_it_did(profile: str) -> None:
    file, text = GOLDEN / f"{profile}.yaml", rendered(profile, whole=False)
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, "if this is meant: UPDATE_GOLDEN=1 and scripts/chart.py"


@pytest.mark.parametrize("profile", PROFILES)
def test_helm_lint_finds_nothing(profile: str) -> None:
    report = helm.lint(CHART, values(profile), strict=True, kube_version="v1.34.0")
    assert not report["errors"]
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_helm_schema_and_kuberay_manifests_are_what_code_and_chart_say() -> None:
    done = subprocess.run(
        (sys.executable, "scripts/chart.py", "--check"), cwd=HOUSE, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every table of the default values in which a key may be mistyped; free ones (labels and the like) are not."""
    if not isinstance(value, dict) or (not value and path):
        return []
    free = ("podAnnotations", "nodeSelector", "annotations", "labels", "requests", "limits", "workers")
    found = [path]
    for name, one in value.items():
        if name not in free:
            found += places(one, (*path, name))
    return found


def test_an_unknown_key_is_refused_wherever_it_stands_in_helm_values() -> None:
    default = SCRIPT.values_of("values.yaml")
    tables = places(default)
    assert len(tables) > 40
    with helm.Chart.load(CHART) as chart:
        for path in tables:
            wrong = values("cpu")
            inner = wrong
            for name in path:
                inner = inner.setdefault(name, {})
            inner["mistyped"] = "x"
            with pytest.raises(helm.HelmValuesError, match="mistyped"):
                chart.validate_schema(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ports": {"http": "8000"}},
        {"ports": {"http": 70_000}},
        {"image": {"tag": "latest"}},
        {"image": {"tag": 1.0}},
        {"engine": {"mode": "ray"}},
        {"store": {"poolGiB": "8Gi"}},
        {"store": {"poolGiB": 0}},
        {"store": {"sharing": "node"}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"preStopSeconds": 0}},
        {"drain": {"closeSeconds": 10}},
        {"tls": {"mode": "auto"}},
        {"etcd": {"endpoints": ["http://etcd:2379"]}},
        {"etcd": {"bundled": {"image": "etcd:latest"}}},
        {"workers": {"Prefill": {"role": "prefill"}}},
        {"workers": {"prefill": {"role": "conductor"}}},
        {"workers": {"prefill": {"memory": "4Gi"}}},
        {"autoscaling": {"workers": {"decode": {"min": 1, "max": 2, "metric": "cpu", "target": "3"}}}},
        {"config": {"scheduler": {"polcy": "moonpool"}}},
        {"config": {"scheduler": {"max_waiting": "many"}}},
        {"config": {"scheduler": {"roles": "sometimes"}}},
        {"config": {"gateway": {"port": 9000}}},
        {"config": {"security": {"allow_plain": True}}},
    ],
    ids=str,
)
def test_helm_refuses_values_of_the_wrong_kind(wrong: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values("cpu"))
        with pytest.raises(helm.HelmValuesError):
            chart.validate_schema(values("cpu", **wrong))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tls": {"trustNetwork": False}}, "tls.trustNetwork"),
        ({"etcd": {"bundled": {"enabled": False}}}, "etcd.endpoints: empty"),
        ({"keys": {"existingSecret": ""}}, "keys.existingSecret: empty"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.host: empty"),
        ({"etcd": {"user": "root"}}, "etcd.password.existingSecret: empty"),
        ({"tls": {"mode": "csi"}}, "tls.issuer.name: empty"),
        ({"engine": {"mode": "kuberay"}, "tls": {"mode": "csi"}}, "use engine.mode=plain"),
        (
            {
                "autoscaling": {
                    "kind": "hpa",
                    "workers": {"decoed": {"min": 1, "max": 2, "metric": "moonpool_x", "target": "1"}},
                }
            },
            "autoscaling.workers.decoed: there is no such group",
        ),
    ],
    ids=str,
)
def test_helm_says_what_is_missing(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        rendered("cpu", **wrong)


def test_helm_manifests_are_printed_for_files_of_values_or_their_faults_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("image: {repository: registry/mine}\n")
    files = [str(CHART / FILE.format("cpu")), str(mine)]
    assert SCRIPT.print_manifests(files) == 0
    assert "image: registry/mine:" in capsys.readouterr().out.replace('"', "")
    mine.write_text("gatway: {}\n")
    assert SCRIPT.print_manifests(files) == 1
    told = capsys.readouterr()
    assert (told.out, "'gatway' not allowed" in told.err) == ("", True)


def test_helm_values_reach_the_configuration_as_they_are_written(tmp_path: Path) -> None:
    import tomllib

    import yaml

    wanted = {
        "scheduler": {"policy_settings": {"lookahead_s": 0.5}, "max_waiting": 1_000_000, "roles": "auto"},
        "store": {"quotas": {"alice": 1 << 40}, "lossy_for": ['a "quoted" <name>'], "demote_below": 0.01},
        "engine": {"page_bytes": "512 MiB", "reuse": False},
    }
    manifests = list(yaml.safe_load_all(rendered("cpu", config=wanted)))
    text = next(m["data"]["moonpool.toml"] for m in manifests if m["kind"] == "ConfigMap")
    found = tomllib.loads(text)
    for section, keys in wanted.items():
        for key, value in keys.items():
            assert found[section][key] == value and type(found[section][key]) is type(value), (section, key)


def test_helm_options_that_no_profile_takes_render_too() -> None:
    import yaml

    more = {
        "autoscaling": {
            "kind": "hpa",
            "gateway": {"enabled": True},
            "workers": {"decode": {"min": 1, "max": 4, "metric": "moonpool_decode_requests_running", "target": "16"}},
        },
        "etcd": {"user": "moonpool", "password": {"existingSecret": "etcd-user"}, "bundled": {"storage": "2Gi"}},
        "kvEncryption": True,
        "store": {"ssd": {"enabled": True, "gib": 4}},
        "workers": {"prefill": None, "decode": None, "both": {"role": "both", "replicas": 3}},
        "gateway": {"service": {"type": "LoadBalancer"}},
        "serviceAccount": {"create": False, "name": "given"},
    }
    more["autoscaling"]["workers"] = {}  # type: ignore[index]
    wanted = values("cpu")
    merged = SCRIPT.merged(wanted, copy.deepcopy(more))
    manifests = [m for m in yaml.safe_load_all(SCRIPT.manifests(SCRIPT.render(merged))) if m]
    kinds = [f"{m['kind']}/{m['metadata']['name']}" for m in manifests]
    assert "HorizontalPodAutoscaler/moonpool-gateway" in kinds and "StatefulSet/moonpool-both" in kinds
    assert not [kind for kind in kinds if "decode" in kind or kind.startswith("ServiceAccount")]
    gateway = next(m for m in manifests if m["metadata"]["name"] == "moonpool-gateway" and m["kind"] == "Deployment")
    assert "replicas" not in gateway["spec"], "whoever scales says how many"


def _odd_labels(one: Any) -> list[Any]:
    """Labels and selectors in ``one`` whose values are no texts."""
    if isinstance(one, list):
        return [odd for each in one for odd in _odd_labels(each)]
    if not isinstance(one, dict):
        return []
    own = {**(one.get("labels") or {}), **(one.get("matchLabels") or {})}
    return [pair for pair in own.items() if not isinstance(pair[1], str)] + _odd_labels(list(one.values()))


def test_helm_names_that_look_like_other_kinds_of_yaml_stay_names() -> None:
    import yaml

    more = {
        "cluster": {"name": "1.0"},
        "workers": {"null": {"role": "both"}, "on": {"role": "both"}},
        "serviceAccount": {"create": False, "name": "123"},
        "model": {"hostPath": "/models: all #1"},
        "keys": {"existingSecret": "456"},
    }
    made = SCRIPT.render(values("cpu", **more), release="true")
    manifests = [m for m in yaml.safe_load_all(SCRIPT.manifests(made)) if m]
    assert _odd_labels(manifests) == []
    spec = next(m for m in manifests if m["kind"] == "StatefulSet" and "moonpool-on" in m["metadata"]["name"])
    spec = spec["spec"]["template"]["spec"]
    named = {one["name"]: one for one in spec["volumes"]}
    assert spec["serviceAccountName"] == "123"
    assert (named["model"]["hostPath"]["path"], named["keys"]["secret"]["secretName"]) == ("/models: all #1", "456")


@pytest.mark.parametrize("group", ["gateway", "conductor", "store", "etcd", "members"])
def test_helm_keeps_names_of_its_own_from_groups_of_workers(group: str) -> None:
    with pytest.raises(helm.HelmError, match=group):
        rendered("cpu", workers={group: {"role": "both"}})


def test_helm_refuses_a_release_that_services_could_not_be_called_by() -> None:
    with pytest.raises(helm.HelmError, match="set fullnameOverride"):
        SCRIPT.render(values("cpu"), release="123")
    SCRIPT.render(values("cpu", fullnameOverride="llm"), release="123")


def test_helm_scales_a_group_by_its_own_pods_where_another_s_name_begins_alike() -> None:
    import yaml

    scale = {"min": 1, "max": 4, "metric": "moonpool_decode_requests_running", "target": "16"}
    more = {
        "workers": {"decode": {"role": "decode"}, "decode-big": {"role": "decode"}},
        "autoscaling": {
            "kind": "keda",
            "prometheus": "http://p:9090",
            "gateway": {"enabled": True},
            "workers": {"decode": scale},
        },
    }
    manifests = [m for m in yaml.safe_load_all(rendered("cpu", **more)) if m]
    queries = {
        m["metadata"]["name"]: m["spec"]["triggers"][0]["metadata"]["query"] for m in manifests if m["kind"] == "ScaledObject"
    }
    pods = "moonpool-decode-0", "moonpool-decode-12", "moonpool-decode-big-0", "moonpool-gateway-6d4b75cb6d-hwgcd"
    patterns = {name: re.findall('pod=~"(.*?)"', query)[0] for name, query in queries.items()}
    counted = {name: [pod for pod in pods if re.fullmatch(pattern, pod)] for name, pattern in patterns.items()}
    assert counted == {"moonpool-decode": [*pods[:2]], "moonpool-gateway": [pods[3]]}


def test_helm_labels_what_is_scraped_as_alerts_and_dashboards_ask_for_it() -> None:
    import yaml

    more = {"monitoring": {"serviceMonitor": {"enabled": True}}, "fullnameOverride": "llm", "cluster": {"name": "west"}}
    manifests = [m for m in yaml.safe_load_all(rendered("cpu", **more)) if m]
    for endpoint in next(m for m in manifests if m["kind"] == "ServiceMonitor")["spec"]["endpoints"]:
        labels = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
        assert labels == {"job": "moonpool", "cluster": "west"}
        assert 'up{job=~".*moonpool.*"}' in (CHART / "files/alerts.yaml").read_text(encoding="utf-8")


def test_helm_replays_a_trace_with_an_odd_name_by_ray_too_and_says_what_a_job_cannot_have() -> None:
    import shlex

    import yaml

    trace = "/models/it's a trace; $(date).jsonl"
    manifests = [m for m in yaml.safe_load_all(rendered("kuberay", replay={"trace": trace})) if m]
    words = [shlex.split(m["spec"]["entrypoint"]) for m in manifests if m["kind"] == "RayJob"]
    assert ["moonpool", "replay", trace] in [one[:3] for one in words]
    with pytest.raises(helm.HelmError, match=r"replay\.apiKey: a Ray job gets no Secret"):
        rendered("kuberay", replay={"apiKey": {"existingSecret": "keys"}})


def test_helm_ships_alerts_and_dashboards_as_they_are() -> None:
    import yaml

    manifests = {m["kind"] + m["metadata"]["name"]: m for m in yaml.safe_load_all(rendered("gpu")) if m}
    alerts = yaml.safe_load((HOUSE / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))
    assert manifests["PrometheusRulemoonpool"]["spec"] == alerts and alerts["groups"]
    shown = manifests["ConfigMapmoonpool-dashboard"]["data"]
    files = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in (HOUSE / "deploy/grafana").glob("*.json")}
    assert {name: json.loads(text) for name, text in shown.items()} == files and files
