"""The image's recipe: pinned, for a user that is not root, of everything that the package is made of."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from support.chart import CHART, HOUSE

from moonpool import __version__

DOCKERFILE = (HOUSE / "deploy/Dockerfile").read_text(encoding="utf-8")
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)


def pinned(package: str) -> str:
    project: dict[str, Any] = tomllib.loads((HOUSE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(rf"{package}(?:\[\w+\])?==(.+)", one) for one in project["dependencies"]]
    return next(match[1] for match in found if match)


def test_every_stage_begins_at_a_pinned_image_or_another_stage() -> None:
    names = {name for _, name, _ in STAGES}
    assert {"cpu", "cuda"} <= names
    for base, name, _ in STAGES:
        assert base in names or re.fullmatch(r"debian:bookworm-\d{8}-slim", base), (name, base)


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_a_stage_that_runs_is_nobody_s_root_and_says_what_it_is(stage: str) -> None:
    text = next(body for _, name, body in STAGES if name == stage)
    user = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["user"]
    assert f"USER {user}:{user}" in text and f"user={user}" in (HOUSE / "deploy/image/install").read_text(encoding="utf-8")
    assert "HEALTHCHECK NONE" in text, "the kubelet asks by itself"
    assert f'org.opencontainers.image.version="{__version__}"' in text
    assert 'ENTRYPOINT ["moonpool"]' in text
    assert "/usr/local/lib/moonpool/install user" in text


def test_helm_chart_and_image_are_of_the_versions_that_are_pinned() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
    assert values["engine"]["kuberay"]["rayVersion"] == pinned("ray"), "KubeRay goes by what it is told"
    for profile in ("gpu", "rdma"):
        own = yaml.safe_load((CHART / f"values-{profile}.yaml").read_text(encoding="utf-8"))
        assert own["image"]["tag"] == f"{__version__}-cuda"


def test_the_image_is_built_of_all_rooms_and_of_nothing_that_is_private() -> None:
    lines = (HOUSE / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    rooms = {path.name for path in (HOUSE / "moonpool").iterdir() if path.is_symlink()}
    assert len(rooms) > 8 and rooms <= let_in and {"pyproject.toml", "README.md", "LICENSE", "moonpool"} <= let_in
    assert "*" in lines and not let_in & {".git", "tests", "runs", ".venv", "deploy"}


def test_the_image_s_scripts_are_scripts_and_find_torch_s_pin() -> None:
    for shell, name in (("sh", "install"), ("bash", "prove")):
        file = HOUSE / "deploy/image" / name
        assert file.stat().st_mode & 0o111
        subprocess.run((shell, "-n", str(file)), check=True, timeout=20)
    script = (HOUSE / "deploy/image/install").read_text(encoding="utf-8")
    expression = re.search(r"sed -n '([^']+)'", script)
    assert expression is not None
    found = subprocess.run(
        ("sed", "-n", expression[1], str(HOUSE / "pyproject.toml")), capture_output=True, text=True, check=True, timeout=20
    )
    assert found.stdout.strip() == f"torch=={pinned('torch')}"
    refused = subprocess.run((str(HOUSE / "deploy/image/install"), "everything"), capture_output=True, check=False, timeout=20)
    assert refused.returncode == 2
