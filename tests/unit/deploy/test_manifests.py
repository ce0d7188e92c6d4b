"""Manifests as they are shipped (the chart's renders, deploy/kuberay): valid by schema, and right by the code's own words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart import (
    CHART,
    GOLDEN,
    HOUSE,
    PROFILES,
    Manifest,
    Pod,
    command_lines,
    config_text,
    filled,
    golden,
    named,
    of_kind,
    pods,
    read,
    role_of,
)

from moonpool.cluster.configure import load_config
from moonpool.cluster.identity.exposure import require_unexposed
from moonpool.cluster.leaving import end_s
from moonpool.core.config import Config
from moonpool.core.ids import Role
from moonpool.core.principal import Party
from moonpool.kvstore.agent import PATH_LIMIT, socket_path
from moonpool.wire.rights import RIGHTS

KUBERAY = HOUSE / "deploy/kuberay/moonpool.yaml"
LIVES_ON = ("Deployment", "StatefulSet", "DaemonSet")
# Kinds of others, whose schemas are not here: what the chart may write of them.
FOREIGN = {
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": set(),  # its rules are deploy/prometheus/alerts.yaml
    "ScaledObject": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "triggers"},
}
RAY_KINDS = ("RayCluster", "RayJob")

every_profile = pytest.mark.parametrize("profile", PROFILES)


def config_of(
    profile: str, container: Manifest | None = None, file: str = "moonpool.toml", folder: Path | None = None
) -> Config:
    """What a process of ``container`` reads: the file and its variables, by the code's own loader."""
    target = (folder or Path("/tmp")) / "moonpool.toml"
    target.write_text(config_text(golden(profile), file), encoding="utf-8")
    environment = {
        one["name"]: one.get("value", "10.0.0.7")
        for one in (container or {}).get("env", ())
        if one["name"].startswith("MOONPOOL_")
    }
    config, _ = load_config(target, environment, {})
    require_unexposed(config)
    return config


def served(profile: str) -> Iterator[tuple[Pod, Manifest, str]]:
    """(pod, container, role) of every process of ours."""
    for pod in pods(golden(profile)):
        for container in pod.containers():
            if role := role_of(container):
                yield pod, container, role


# schemas


@pytest.mark.parametrize("file", [*(GOLDEN / f"{p}.yaml" for p in PROFILES), KUBERAY], ids=lambda file: file.name)
def test_manifests_of_built_in_kinds_are_valid_to_the_last_key(file: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    known = 0
    for one in read(file):
        if one["kind"] in (*FOREIGN, *RAY_KINDS):
            continue
        kubernetes_validate.validate(one, "1.34", strict=True)  # SchemaNotFoundError: a kind nobody knows
        known += 1
    assert known > 10


@pytest.mark.parametrize("file", [GOLDEN / "kuberay.yaml", KUBERAY], ids=lambda file: file.parent.name)
def test_kuberay_manifests_are_valid_by_the_operator_s_own_schemas(file: Path) -> None:
    folder = os.environ.get("MOONPOOL_CRDS", "")
    if not folder:
        pytest.skip("MOONPOOL_CRDS names no folder of KubeRay's CRDs (helm-chart/kuberay-operator/crds of its repository)")
    from jsonschema import Draft202012Validator

    seen = set()
    for one in read(file):
        if one["kind"] in RAY_KINDS:
            errors = [
                f"{error.json_path}: {error.message}"
                for error in Draft202012Validator(_crd(folder, one["kind"])).iter_errors(
                    _defaulted(one, _crd(folder, one["kind"]))
                )
            ]
            assert not errors, (one["metadata"]["name"], errors[:5])
            seen.add(one["kind"])
    assert seen == set(RAY_KINDS)


@cache
def _crd(folder: str, kind: str) -> Any:
    text = (Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text(encoding="utf-8")
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(v for v in loaded["spec"]["versions"] if v["name"] == "v1")
    shape = _closed(version["schema"]["openAPIV3Schema"])
    shape["properties"]["metadata"] = {"type": "object"}
    return shape


def _closed(shape: Any) -> Any:
    """A CRD's schema for jsonschema: closed, with its own types of values."""
    if isinstance(shape, list):
        return [_closed(one) for one in shape]
    if not isinstance(shape, dict):
        return shape
    made = {name: one if name in ("enum", "required", "default") else _closed(one) for name, one in shape.items()}
    open_ones = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and not any(made.get(one) for one in open_ones):
        made["additionalProperties"] = False
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def _defaulted(value: Any, shape: Any) -> Any:
    """As the API server fills in what a CRD has defaults for."""
    if isinstance(value, dict) and isinstance(shape.get("properties"), dict):
        whole = dict(value)
        for name, one in shape["properties"].items():
            if name in whole:
                whole[name] = _defaulted(whole[name], one)
            elif "default" in one:
                whole[name] = one["default"]
        return whole
    if isinstance(value, list) and isinstance(shape.get("items"), dict):
        return [_defaulted(one, shape["items"]) for one in value]
    return value


def test_a_misspelt_key_fails_the_kuberay_schema() -> None:
    folder = os.environ.get("MOONPOOL_CRDS", "")
    if not folder:
        pytest.skip("MOONPOOL_CRDS names no folder of KubeRay's CRDs")
    from jsonschema import Draft202012Validator

    cluster = of_kind(golden("kuberay"), "RayCluster")[0]
    wrong = {**cluster, "spec": {**cluster["spec"], "enableAutoscaling": True}}
    shape = _crd(folder, "RayCluster")
    errors = [error.message for error in Draft202012Validator(shape).iter_errors(_defaulted(wrong, shape))]
    assert any("enableAutoscaling" in message for message in errors)


@every_profile
def test_manifests_of_other_operators_say_only_what_is_meant(profile: str) -> None:
    for one in of_kind(golden(profile), *FOREIGN):
        assert set(one["spec"]) == FOREIGN[one["kind"]], one["metadata"]["name"]


def test_yaml_of_manifests_and_values_is_clean() -> None:
    pytest.importorskip("yamllint")
    files = [str(path) for path in (*GOLDEN.glob("*.yaml"), *CHART.glob("*.yaml"), *(HOUSE / "deploy/kuberay").glob("*.yaml"))]
    rules = {
        "line-length": "disable",
        "document-start": "disable",
        "comments": {"min-spaces-from-content": 1},
        "indentation": {"indent-sequences": "whatever"},
    }
    command = (sys.executable, "-m", "yamllint", "-s", "-d", json.dumps({"extends": "default", "rules": rules}), *files)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


# command lines, settings, ports: the code's own words


@cache
def _commands() -> Any:
    from typer.main import get_command

    from moonpool.cli.main import Choices, build

    return get_command(build(Choices()))


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """(verb, its parameters) as the command line's own parser reads ``words``. An error where it refuses them."""
    told: list[dict[str, Any]] = []
    command, verb = _commands(), words[0]
    inner = command.commands[verb]
    original, inner.callback = inner.callback, lambda **values: told.append(values)
    try:
        command.main(words, prog_name="moonpool", standalone_mode=False)
    finally:
        inner.callback = original
    return verb, told[0]


@every_profile
def test_every_command_line_in_manifests_is_one_of_ours(profile: str) -> None:
    lines = list(command_lines(golden(profile)))
    assert len(lines) >= (5 if profile != "kuberay" else 4)
    for where, words in lines:
        verb, values = parsed([filled(word) for word in words])
        assert verb in ("run", "up", "replay"), where
        if verb == "run":
            assert values["role"] in {role.value for role in Role}, where
            assert values["member"] and values["node"], where
    with pytest.raises(Exception, match="No such option"):
        parsed(["run", "store", "--member", "store-a"])


@every_profile
def test_every_setting_in_manifests_is_known_and_fits(profile: str, tmp_path: Path) -> None:
    for pod, container, role in served(profile):
        config = config_of(profile, container, folder=tmp_path)
        assert config.cluster.host == config.cluster.probe_host == "10.0.0.7", (pod.owner, role)
        assert config.cluster.registry.startswith("etcd")
        names = [one["name"] for one in container["env"]]
        assert len(names) == len(set(names)), "a variable is set twice"
    if profile == "kuberay":
        config = config_of(profile, file="ray.toml", folder=tmp_path)
        assert config.cluster.ray_address == "auto"
        groups = {g["groupName"]: g for g in of_kind(golden(profile), "RayCluster")[0]["spec"]["workerGroupSpecs"]}
        for name, group in groups.items():
            nodes = [node for node in config.cluster.nodes if node.labels.items() <= group["labels"].items()]
            assert len(nodes) == group["maxReplicas"], f"{name}: one Ray pod per node id"


@every_profile
def test_manifests_name_the_ports_that_processes_take(profile: str, tmp_path: Path) -> None:
    for pod, container, role in served(profile):
        config = config_of(profile, container, folder=tmp_path)
        ports = {one["name"].removeprefix("store-"): one["containerPort"] for one in container["ports"]}
        wanted = {"control": config.cluster.port, "probe": config.cluster.probe_port}
        if role == "gateway":
            wanted["http"] = config.gateway.port
        if role == "store":
            wanted["data"] = config.transfer.port
        assert ports == wanted, (pod.owner, role)
        assert all(wanted.values()), "a port of 0 is any free one: nobody would find it"
    service = named(golden(profile), "Service", "moonpool")
    assert service["spec"]["ports"][0]["targetPort"] == "http"


def test_manifests_listen_where_the_code_does_by_default() -> None:
    assert tomllib.loads(config_text(golden("cpu")))["gateway"]["port"] == Config().gateway.port
    assert tomllib.loads(config_text(golden("cpu")))["timing"]["drain_ms"] == Config().timing.drain_ms


@every_profile
def test_metrics_in_helm_values_and_manifests_are_told_by_the_code(profile: str) -> None:
    from moonpool.cluster.probe.catalogue.declared import series_names

    used = set()
    for one in of_kind(golden(profile), "ScaledObject"):
        query = one["spec"]["triggers"][0]["metadata"]["query"]
        used.add(query.removeprefix("sum(").partition("{")[0])
    for one in of_kind(golden(profile), "HorizontalPodAutoscaler"):
        used |= {metric["pods"]["metric"]["name"] for metric in one["spec"]["metrics"]}
    default = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    used.add(default["autoscaling"]["gateway"]["metric"])
    assert used <= series_names(), used - series_names()


# probes, ends, memory, rights


@every_profile
def test_manifests_probe_every_process_by_the_paths_and_patience_that_are_documented(profile: str, tmp_path: Path) -> None:
    checked = 0
    for pod, container, role in served(profile):
        stuck_s = config_of(profile, container, folder=tmp_path).timing.stuck_after_ms / 1e3
        startup, live, ready = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
        assert (startup["httpGet"]["path"], live["httpGet"]["path"], ready["httpGet"]["path"]) == ("/live", "/live", "/ready")
        port = next(p["name"] for p in container["ports"] if p["name"].endswith("probe"))
        assert {probe["httpGet"]["port"] for probe in (startup, live, ready)} == {port}, (pod.owner, role)
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600, "loading takes minutes"
        assert ready["periodSeconds"] * ready["failureThreshold"] <= 5, "new work stops soon"
        patience = live["periodSeconds"] * live["failureThreshold"] + live["timeoutSeconds"]
        assert 30 <= patience < stuck_s, "slow, and before a process that stands still ends itself"
        checked += 1
    assert checked >= 2


@every_profile
def test_manifests_give_processes_more_time_to_leave_than_they_take(profile: str, tmp_path: Path) -> None:
    for pod in pods(golden(profile)):
        needed = 0.0
        for container in pod.containers():
            if role := role_of(container):
                hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
                assert hook[0] == "sleep"
                needed += float(hook[1]) + end_s(config_of(profile, container, folder=tmp_path), Role(role))
        if pod.component in ("ray-head", "ray-worker"):
            config = config_of(profile, file="ray.toml", folder=tmp_path)
            needed = end_s(config, Role.DECODE) + end_s(config, Role.STORE)
        assert pod.spec["terminationGracePeriodSeconds"] > needed, pod.owner
    for job in of_kind(golden(profile), "RayJob"):
        if " up " in job["spec"]["entrypoint"]:
            config = config_of(profile, file="ray.toml", folder=tmp_path)
            waited = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
            assert float(waited) > end_s(config, Role.DECODE) + end_s(config, Role.STORE), "Ray would kill it after 3 s"
    gateway = named(golden(profile), "Deployment", "moonpool-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert float(gateway["lifecycle"]["preStop"]["exec"]["command"][1]) >= 1, "proxies hear of its leaving first"


@every_profile
def test_manifests_mount_the_pool_s_memory_where_store_nodes_and_workers_share_it(profile: str, tmp_path: Path) -> None:
    stores = [(p, c) for p, c, role in served(profile) if role == "store"]
    stores += [(pod, pod.containers()[0]) for pod in pods(golden(profile)) if pod.component == "ray-worker"]
    assert stores
    for pod, container in stores:
        file = "ray.toml" if pod.component == "ray-worker" else "moonpool.toml"
        config = config_of(profile, container, file=file, folder=tmp_path)
        folder = config.store.directory or "/dev/shm"
        volume = pod.mounted(container, folder)
        memory = _bytes(container["resources"]["limits"]["memory"])
        assert memory >= config.store.pool_bytes + (1 << 30), "the pool counts for who touches it"
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        if "emptyDir" in volume:
            assert volume["emptyDir"]["medium"] == "Memory"
            size = _bytes(volume["emptyDir"]["sizeLimit"])
            assert config.store.pool_bytes + (64 << 20) <= size < 1.5 * config.store.pool_bytes + (1 << 30)
        else:
            assert volume["hostPath"]["path"].startswith("/dev/shm/")
            _require_shared(profile, volume, folder)
            longest = "n" * 63
            sockets = Path(config.cluster.state_dir)
            assert len(os.fsencode(socket_path(sockets, longest))) <= PATH_LIMIT
            assert socket_path(sockets, longest).parent == sockets, "else it would lie in a folder of the pod's own"


def _require_shared(profile: str, volume: Manifest, folder: str) -> None:
    """Workers find the paths that their store node names."""
    workers = [(p, c) for p, c, role in served(profile) if role in ("prefill", "decode", "both")]
    assert workers
    for pod, container in workers:
        assert pod.mounted(container, folder)["hostPath"]["path"] == volume["hostPath"]["path"]
        near = pod.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
        assert near["topologyKey"] == "kubernetes.io/hostname"
        assert near["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "store"


def _bytes(text: str) -> int:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]]


@every_profile
def test_manifests_give_processes_no_right_that_they_do_not_need(profile: str) -> None:
    for pod in pods(golden(profile)):
        api = pod.component == "ray-head"
        assert pod.spec["automountServiceAccountToken"] is api, pod.owner
        assert pod.spec["enableServiceLinks"] is False, "MOONPOOL_..._PORT of a Service would be read as settings"
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers():
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            added = security["capabilities"].get("add", [])
            rdma = any(name.startswith("rdma/") for name in container["resources"]["limits"])
            allowed = ["CHOWN"] if container["name"] == "folders" else ["IPC_LOCK"] if rdma else []
            assert added == allowed, (pod.owner, container["name"])
            assert security.get("runAsUser", 10001) == (0 if container["name"] == "folders" else 10001)
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"} and "memory" in container["resources"]["limits"]
    assert not of_kind(golden(profile), "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


@every_profile
def test_manifests_pin_images_and_hold_no_secret(profile: str) -> None:
    assert not of_kind(golden(profile), "Secret")
    for pod in pods(golden(profile)):
        for container in pod.containers():
            name, _, tag = container["image"].rpartition(":")
            assert name and tag and tag != "latest" and "/" not in tag, container["image"]
            for one in container.get("env", ()):
                if any(word in one["name"] for word in ("KEY", "TOKEN", "PASSWORD")):
                    assert "secretKeyRef" in one["valueFrom"], one["name"]
        for volume in pod.spec.get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, "a process that is not root reads it by its group"


@every_profile
def test_manifests_mount_what_they_have_and_have_what_they_mount(profile: str) -> None:
    for pod in pods(golden(profile)):
        mounted = {m["name"] for c in pod.containers() for m in c.get("volumeMounts", ())}
        kept = [m["metadata"]["name"] for m in golden(profile) if m["kind"] == "StatefulSet"]
        assert kept or profile == "kuberay"
        assert mounted == {v["name"] for v in pod.spec.get("volumes", ())}, pod.owner
        for container in pod.containers():
            paths = [m["mountPath"] for m in container.get("volumeMounts", ())]
            assert len(paths) == len(set(paths))
            assert not role_of(container) or {"/tmp", "/home/moonpool", "/run/moonpool/state"} <= set(paths)


@every_profile
def test_every_file_that_the_configuration_names_in_manifests_is_mounted(profile: str, tmp_path: Path) -> None:
    for pod, container, role in served(profile):
        config = config_of(profile, container, folder=tmp_path)
        security = config.security
        files = [config.cluster.key_file, security.tls_dir, security.etcd_ca, security.etcd_key, security.etcd_password_file]
        files += [security.api_keys_file] if role in ("gateway", "store") else []
        files += [security.https_cert, security.https_key] if role == "gateway" else []
        files += [config.model.path] if config.model.path.startswith("/") else []
        for file in filter(None, files):
            volume = pod.mounted(container, file)
            assert set(volume) & {"secret", "csi", "persistentVolumeClaim", "hostPath"}, (pod.owner, file)
    certified = [v for pod in pods(golden(profile)) for v in pod.spec["volumes"] if "csi" in v]
    for volume in certified:
        uri = volume["csi"]["volumeAttributes"]["csi.cert-manager.io/uri-sans"]
        assert uri.startswith(f"moonpool://{config.cluster.name}/") and uri.split("/")[3] in {party.value for party in Party}
    assert bool(certified) == (profile == "rdma")


@every_profile
def test_manifests_keep_enough_of_everything_while_nodes_are_drained(profile: str) -> None:
    budgets = of_kind(golden(profile), "PodDisruptionBudget")
    labels = [pod.labels for pod in pods(golden(profile))]
    for budget in budgets:
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        assert any(wanted <= one.items() for one in labels), budget["metadata"]["name"]
    kinds = LIVES_ON[:2]
    kept = {one["metadata"]["name"] for one in of_kind(golden(profile), *kinds)} - {"moonpool-etcd"}
    groups = {g["groupName"] for c in of_kind(golden(profile), "RayCluster") for g in c["spec"]["workerGroupSpecs"]}
    assert {b["metadata"]["name"] for b in budgets} == kept | {f"moonpool-{group}" for group in groups}


# who may talk to whom


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))


def reaches(manifests: tuple[Manifest, ...], source: dict[str, str] | None, target: dict[str, str], port: int) -> bool:
    """Whether network policies let ``source`` (labels of a pod here; None: elsewhere) connect to ``port`` of ``target``."""
    policies = [p for p in of_kind(manifests, "NetworkPolicy") if _matches(p["spec"]["podSelector"], target)]
    assert policies, f"no policy is about {target}"
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            fits = any(
                one["port"] <= port <= one.get("endPort", one["port"]) and one["protocol"] == "TCP" for one in rule["ports"]
            )
            peers = rule.get("from")
            known = peers is None or (
                source is not None and any("podSelector" in p and _matches(p["podSelector"], source) for p in peers)
            )
            if fits and known:
                return True
    return False


HOSTS = {  # service -> whose port it is on
    "Conductor": {Party.CONDUCTOR},
    "Decode": {Party.DECODE, Party.BOTH},
    "Prefill": {Party.PREFILL, Party.BOTH},
    "Store": {Party.STORE},
    "StoreAdmin": {Party.STORE},
    "Admin": {Party.GATEWAY, Party.CONDUCTOR, Party.STORE, Party.PREFILL, Party.DECODE},
}


@pytest.mark.parametrize("profile", ["cpu", "gpu", "rdma"])
def test_network_policies_in_manifests_let_through_what_the_table_of_rights_allows_and_strangers_only_to_gateways(
    profile: str, tmp_path: Path
) -> None:
    manifests = golden(profile)
    of_party: dict[Party, list[tuple[dict[str, str], Config]]] = {}
    for pod, container, role in served(profile):
        of_party.setdefault(Party(role), []).append((pod.labels, config_of(profile, container, folder=tmp_path)))
    for rpc, callers in RIGHTS.items():
        for host in HOSTS.get(rpc.partition(".")[0], set()) & set(of_party):
            for target, config in of_party[host]:
                for caller in callers & set(of_party):
                    assert all(reaches(manifests, source, target, config.cluster.port) for source, _ in of_party[caller]), (
                        rpc,
                        caller,
                    )
                assert not reaches(manifests, {"app": "stranger"}, target, config.cluster.port), rpc
                assert not reaches(manifests, None, target, config.cluster.port), rpc
    for target, config in of_party[Party.STORE]:
        writers = [labels for party in (Party.PREFILL, Party.DECODE, Party.STORE) for labels, _ in of_party[party]]
        assert all(reaches(manifests, writer, target, config.transfer.port) for writer in writers)
        assert not reaches(manifests, of_party[Party.GATEWAY][0][0], target, config.transfer.port)
    for target, config in of_party[Party.GATEWAY]:
        assert reaches(manifests, None, target, config.gateway.port) == (profile != "rdma")
    for etcd in [pod.labels for pod in pods(manifests) if pod.component == "etcd"]:
        assert reaches(manifests, of_party[Party.PREFILL][0][0], etcd, 2379)
        assert not reaches(manifests, {"app": "stranger"}, etcd, 2379)


def test_network_policies_in_manifests_let_kuberay_and_jobs_of_the_chart_through_where_clients_are_chosen() -> None:
    ray, chosen = golden("kuberay"), golden("rdma")
    head = next(pod.labels for pod in pods(ray) if pod.component == "ray-head")
    operator = {"app.kubernetes.io/component": "kuberay-operator"}
    assert reaches(ray, operator, head, 8265), "it asks how jobs do"
    assert not reaches(ray, operator, head, 6379)
    gateway = next(pod.labels for pod in pods(chosen) if pod.component == "gateway")
    for component, allowed in (("replay", True), ("test", True), ("operator", True), ("worker", False), ("anything", False)):
        source = {**gateway, "app.kubernetes.io/component": component}
        assert reaches(chosen, source, gateway, 8000) == allowed, component
