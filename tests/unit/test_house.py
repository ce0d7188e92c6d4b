"""The house itself: links, light imports, pinned dependencies, nothing of one machine in tracked files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "jsonpickle", "joblib"}
CALLS_CODE = {"eval", "exec", "torch.load", "np.load", "numpy.load"}
HEAVY = ("torch", "grpc", "ray", "nixl_cu12", "transformers")


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and not (ROOT / name).is_symlink()]


def test_every_entry_of_the_import_package_is_a_link_to_a_folder_of_the_root() -> None:
    entries = [e for e in (ROOT / "moonpool").iterdir() if e.name not in ("__init__.py", "py.typed", "__pycache__")]
    assert entries
    for entry in entries:
        assert entry.is_symlink(), f"{entry.name} is a copy, not a link"
        assert entry.is_dir(), f"{entry.name} points nowhere"
        assert entry.readlink() == Path("..") / entry.name
        assert (entry / "__init__.py").is_file()


def test_every_folder_with_code_has_its_link() -> None:
    linked = {e.name for e in (ROOT / "moonpool").iterdir() if e.is_symlink()}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("moonpool", "tests")}
    assert folders == linked


@pytest.mark.parametrize(
    "module",
    [
        "moonpool.loadgen",
        "moonpool.loadgen.commands",
        "moonpool.sim.run",
        "moonpool.cli.main",
        "moonpool.core",
        "moonpool.engine.models",
    ],
)
def test_importing_leaves_the_heavy_libraries_out(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_of_the_command_comes_without_the_heavy_libraries() -> None:
    code = (
        "import sys, runpy; sys.argv = ['moonpool', '--help']\n"
        "try: runpy.run_module('moonpool.cli.main', run_name='__main__')\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    pinned = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][0-9A-Za-z.]*(; platform_system == '[A-Za-z]+')?")
    loose = [d for d in wanted if not pinned.fullmatch(d)]
    assert loose == []


IMAGE_HOME = "/home/moonpool"  # of the user that our own image makes


def test_scripts_are_executable_and_stop_at_the_first_error() -> None:
    for script in [*(path for path in (ROOT / "scripts").iterdir() if path.is_file()), ROOT / ".ci/run"]:
        assert script.stat().st_mode & 0o111, f"{script.name} is not executable"
        text = script.read_text()
        assert "set -euo pipefail" in text or text.startswith("#!/usr/bin/env python3"), f"{script.name} goes on after an error"


def test_no_path_or_registry_of_one_machine_is_tracked() -> None:
    homes = "|".join(("root", "home", "Users", "work"))
    pattern = re.compile(rf"(?<![\w.~$}})-])/(?:{homes})/|index-url|simple/?['\"]")
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        if path != Path(__file__).resolve():
            lines = text.replace(IMAGE_HOME, "").splitlines()
            found += [f"{path.relative_to(ROOT)}: {line.strip()[:100]}" for line in lines if pattern.search(line)]
    assert found == []


def ways_to_run_code(source: str) -> list[str]:
    """Imports and calls of ``source`` by which bytes of a peer or a file would become code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in RUNS_CODE else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            careless = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            if name in CALLS_CODE or name.endswith(".recv_pyobj") or careless:
                found.append(name)
    return found


def test_nothing_of_ours_turns_bytes_into_code() -> None:
    """Ray's own channel inside a cluster pickles; see docs/failures.md."""
    found = {}
    for path in tracked():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests":
            ways = ways_to_run_code(path.read_text(encoding="utf-8"))
            if ways:
                found[str(path.relative_to(ROOT))] = ways
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "exec(text)",
    ],
)
def test_ways_to_turn_bytes_into_code_are_seen(source: str) -> None:
    assert ways_to_run_code(source)


MAKES_CHANNELS = re.compile(r"(insecure|secure)_channel\(|grpc\.(aio\.)?server\(|add_(in)?secure_port\(")
MAY_MAKE_CHANNELS = {"wire/channels.py", "cluster/etcd/login.py"}  # the second: to etcd, which is none of ours


def test_channels_servers_and_ports_are_made_where_they_are_protected() -> None:
    ours = [path for path in tracked() if path.suffix == ".py" and path.is_file()]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ours}
    found = {
        name
        for name, text in sources.items()
        if not name.startswith(("tests/", "wire/generated/")) and MAKES_CHANNELS.search(text)
    }
    assert found <= MAY_MAKE_CHANNELS, "use moonpool.wire.channels.{dial,dial_blocking,server,bind}"
    assert "wire/channels.py" in found
