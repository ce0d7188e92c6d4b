"""Outcomes of finished runs, one small JSON file each, so that a suite that was stopped goes on where it was.

A file is found by the digest of the run's settings and of the sources that decide its outcome; older ones are never read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.sim.suite.settings import AnyRun, digest

ROOMS = ("core", "scheduler", "kvstore", "prefill_worker", "decode_worker", "loadgen", "sim")
JUDGING = {  # by folder: with the rows, these only read outcomes
    "suite": ("report", "perform", "finished", "paper"),
    "sim": ("compare", "pictures", "report", "search"),
}
Figures = Mapping[str, float]


def code_version(package: Path) -> str:
    """Digest of the sources of every room that a simulation runs, under the import package's folder."""
    h = hashlib.blake2b(digest_size=8)
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            if path.parent.name == "rows" or path.stem in JUDGING.get(path.parent.name, ()):
                continue
            h.update(f"{path.relative_to(package)}\n".encode())
            h.update(path.read_bytes())
    return h.hexdigest()


class Finished:
    """``folder`` None: nothing is kept."""

    def __init__(self, folder: Path | None, code: str) -> None:
        self._folder = folder
        self._code = code

    def get(self, run: AnyRun) -> Figures | None:
        if self._folder is None:
            return None
        try:
            stored = json.loads(self._path(self._folder, run).read_text())
        except (OSError, ValueError):
            return None
        figures = stored.get("figures") if isinstance(stored, dict) else None
        if not isinstance(figures, dict) or not all(isinstance(v, int | float) for v in figures.values()):
            return None
        return {str(name): float(value) for name, value in figures.items()}

    def put(self, run: AnyRun, figures: Figures) -> None:
        """ConfigError where the folder cannot be written."""
        if self._folder is None:
            return
        path = self._path(self._folder, run)
        kept = {name: value for name, value in figures.items() if math.isfinite(value)}
        text = json.dumps({"run": run.model_dump(mode="json"), "figures": kept}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(text + "\n")
            part.replace(path)
        except OSError as e:
            raise ConfigError(f"output: cannot write {path}: {e.strerror}; give a writable folder", param="output") from e

    def _path(self, folder: Path, run: AnyRun) -> Path:
        return folder / "runs" / f"{digest(run, self._code)}.json"
