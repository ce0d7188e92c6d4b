#!/usr/bin/env python3
"""What of deploy/ follows from the code and from the chart: `scripts/chart.py`; `--check` only says whether it is so.
`scripts/chart.py --render VALUES.yaml ...` prints the manifests of these files of values, as `helm template -f` does.

* values.schema.json: the settings that `config` may hold are those of core/config.py that the chart does not make itself
* deploy/kuberay: the chart as plain manifests, with the values of values-kuberay.yaml
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from moonpool.core.config import Config

HOUSE = Path(__file__).resolve().parents[1]
CHART = HOUSE / "deploy/helm/moonpool"
SCHEMA = CHART / "values.schema.json"
KUBERAY = HOUSE / "deploy/kuberay/moonpool.yaml"
RELEASE, NAMESPACE = "moonpool", "moonpool"
KUBERAY_HEAD = """\
# Moonpool on KubeRay without Helm: written by scripts/chart.py from the chart and its values-kuberay.yaml.
#   kubectl create namespace moonpool
#   kubectl -n moonpool create secret generic moonpool-keys --from-file=hash.key
#   kubectl -n moonpool apply -f deploy/kuberay/moonpool.yaml
# Change before: images, etcd's address (ConfigMap), the claim `models`, sizes. deploy/kuberay/README.md says more.
"""

# Settings that the chart makes from values of its own (templates/_config.tpl).
MADE = {
    "model": {"path", "name"},
    "store": {"pool_bytes", "directory", "drain_ms", "ssd_path", "ssd_bytes"},
    "transfer": {"port", "ucx_tls", "ucx_net_devices"},
    "timing": {"drain_ms"},
    "gateway": {"host", "port", "drain_ms"},
    "security": {
        "tls", "tls_dir", "allow_plain", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file", "https_cert",
        "https_key", "api_keys_file", "kv_encryption", "kv_key_file",
    },
    "observe": {"log_to"},
    "cluster": {
        "name", "nodes", "launcher", "ray_address", "ray_strategy", "ray_cpus", "ray_gpus_per_worker", "ray_place_ms", "host",
        "port", "probe_host", "probe_port", "registry", "state_dir", "key_file",
    },
}  # fmt: skip


def config_schema() -> dict[str, Any]:
    """The schema of `config`, closed. Sizes may be texts with a unit, as in the configuration file."""
    whole = Config.model_json_schema()
    sections = {}
    for section in Config.model_fields:
        shape = _inlined(whole["properties"][section], whole["$defs"])
        keys = {key: _sized(key, one) for key, one in shape["properties"].items() if key not in MADE.get(section, ())}
        if keys:
            sections[section] = {"type": "object", "additionalProperties": False, "properties": keys}
    return {"type": "object", "additionalProperties": False, "properties": sections}


def _inlined(shape: Any, known: dict[str, Any]) -> Any:
    """Without references, titles and defaults: what is left out counts as the code says, not as the chart does."""
    if isinstance(shape, list):
        return [_inlined(one, known) for one in shape]
    if not isinstance(shape, dict):
        return shape
    if "$ref" in shape:
        return _inlined(known[shape["$ref"].rpartition("/")[2]], known)
    kept = {name: one for name, one in shape.items() if name not in ("title", "default", "description")}
    if isinstance(kept.get("properties"), dict):
        kept["properties"] = {name: _inlined(one, known) for name, one in shape["properties"].items()}
        kept["additionalProperties"] = False
    return {name: one if name == "properties" else _inlined(one, known) for name, one in kept.items()}


def _sized(key: str, shape: dict[str, Any]) -> dict[str, Any]:
    if not key.endswith(("_bytes", "_bytes_per_s")):
        return shape
    return {"anyOf": [shape, {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)? ?(KiB|MiB|GiB|TiB)$"}]}


def schema_text() -> str:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=1) + "\n"


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges values files: the later one counts, tables are merged."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = merged(whole[name], value) if both else value
    return whole


def values_of(*files: str) -> dict[str, Any]:
    return merged(*(yaml.safe_load((CHART / file).read_text(encoding="utf-8")) for file in files))


def render(values: dict[str, Any], release: str = RELEASE) -> dict[str, str]:
    """The chart's manifests by template, made by Helm's own engine. HelmError: the schema or a template refuses ``values``."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        made = chart.render(values, name=release, namespace=NAMESPACE)
    return {name.removeprefix("moonpool/templates/"): text for name, text in sorted(made.items())}


def manifests(made: dict[str, str], *, whole: bool = True) -> str:
    """One YAML file: what `helm template` prints, without tests and notes. Not ``whole``: without what other files hold."""
    parts = []
    for name, text in made.items():
        if name.startswith("tests/") or not name.endswith(".yaml"):
            continue
        for one in re.split(r"^---\n", text, flags=re.MULTILINE):
            if any(line and not line.startswith("#") for line in one.splitlines()):
                lines = [line.rstrip() for line in one.splitlines() if line.strip()]
                if not whole and name == "monitoring.yaml":
                    lines = _without_files(lines)
                parts.append("\n".join(("---", f"# Source: {name}", *lines, "")))
    return "".join(parts)


def _without_files(lines: list[str]) -> list[str]:
    """Alerts and dashboards are files of deploy/, which change by themselves."""
    kind = next(line for line in lines if line.startswith("kind: "))
    cut = {"kind: PrometheusRule": "spec:", "kind: ConfigMap": "data:"}.get(kind)
    return lines if cut is None else [*lines[: lines.index(cut)], f"{cut} {{}}"]


def print_manifests(files: list[str]) -> int:
    import helm_python.errors

    values = merged(*(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {} for file in files))
    try:
        print(manifests(render(values)), end="")
    except helm_python.errors.HelmError as e:
        print(f"chart.py: {e}".rstrip(), file=sys.stderr)
        return 1
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--render"]:
        return print_manifests(sys.argv[2:])
    texts = {SCHEMA: schema_text()}
    if importlib.util.find_spec("helm_python"):
        texts[KUBERAY] = KUBERAY_HEAD + manifests(render(values_of("values-kuberay.yaml")))
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(HOUSE)}: not what the code says; run scripts/chart.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
        print(path.relative_to(HOUSE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
