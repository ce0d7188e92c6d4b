"""The chart and its golden renders, and what pods are in them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HOUSE = Path(__file__).parents[2]
CHART = HOUSE / "deploy/helm/moonpool"
GOLDEN = HOUSE / "tests/golden/chart"
PROFILES = ("cpu", "gpu", "rdma", "kuberay")
OURS = re.compile(r"moonpool(:|$)")
Manifest = dict[str, Any]


def chart_script() -> Any:
    spec = importlib.util.spec_from_file_location("moonpool_chart_script", HOUSE / "scripts/chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def golden(profile: str) -> tuple[Manifest, ...]:
    return tuple(read(GOLDEN / f"{profile}.yaml"))


def read(file: Path) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [one for one in yaml.load_all(file.read_text(encoding="utf-8"), Loader=loader) if one]


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def named(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    return next(one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name)


def config_text(manifests: tuple[Manifest, ...], file: str = "moonpool.toml") -> str:
    return str(named(manifests, "ConfigMap", "moonpool")["data"][file])


@dataclass(frozen=True)
class Pod:
    """A pod template and where it is from."""

    owner: str
    labels: dict[str, str]
    spec: Manifest

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def volume(self, name: str) -> Manifest:
        return next(one for one in self.spec["volumes"] if one["name"] == name)

    def mounted(self, container: Manifest, path: str) -> Manifest:
        """The volume below ``path`` in ``container``."""
        mount = max(
            (m for m in container["volumeMounts"] if path == m["mountPath"] or path.startswith(m["mountPath"] + "/")),
            key=lambda m: len(m["mountPath"]),
        )
        return self.volume(mount["name"])


def pods(manifests: tuple[Manifest, ...]) -> Iterator[Pod]:
    for one in manifests:
        owner, spec = f"{one['kind']}/{one['metadata']['name']}", one.get("spec", {})
        templates = []
        match one["kind"]:
            case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
                templates = [spec["template"]]
            case "RayCluster":
                templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
            case "RayJob":
                templates = [spec["submitterPodTemplate"]]
        for template in templates:
            yield Pod(owner, template["metadata"]["labels"], template["spec"])


def role_of(container: Manifest) -> str | None:
    """ROLE where the container's command is ``moonpool run ROLE``."""
    words = [*container.get("command", ()), *container.get("args", ())]
    return words[2] if words[:2] == ["moonpool", "run"] else None


def command_lines(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every ``moonpool ...`` that a manifest runs."""
    for pod in pods(manifests):
        for container in pod.containers():
            words = [*container.get("command", ()), *container.get("args", ())]
            if words[:1] == ["moonpool"]:
                yield f"{pod.owner} {container['name']}", words[1:]
    for job in of_kind(manifests, "RayJob"):
        words = shlex.split(job["spec"]["entrypoint"])
        assert words[0] == "moonpool", words
        yield f"RayJob/{job['metadata']['name']}", words[1:]


def filled(text: str) -> str:
    """Variables of a command line as the kubelet puts them in."""
    values = {"POD_NAME": "moonpool-prefill-0", "NODE_NAME": "node-7.example", "POD_IP": "10.0.0.7"}
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: values[found[1]], text)
