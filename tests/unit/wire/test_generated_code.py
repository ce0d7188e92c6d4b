from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_committed_code_is_what_the_schemas_generate(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts/generate", tmp_path], check=True, env={"PYTHON": sys.executable, "PATH": _path()}, capture_output=True
    )
    committed = ROOT / "wire/generated"
    made = {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()}
    kept = {p.name: p.read_text() for p in committed.iterdir() if p.is_file()}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "run scripts/generate"


def _path() -> str:
    """protoc finds its plug-ins beside the interpreter."""
    return f"{Path(sys.executable).parent}:/usr/bin:/bin"
