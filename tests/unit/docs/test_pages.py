"""The documentation: built whole, every link leads somewhere, and what describes the code says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[3]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def test_the_site_builds_and_no_link_or_anchor_leads_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)),
        cwd=HOUSE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


def test_the_reference_says_what_the_code_says() -> None:
    done = subprocess.run(
        (sys.executable, "scripts/reference.py", "--check"), cwd=HOUSE, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(HOUSE)) for p in (HOUSE / "deploy").rglob("*.md"))])
def test_pages_beside_the_site_link_to_files_that_exist(page: str) -> None:
    text = (HOUSE / page).read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if not link.startswith(("http://", "https://", "mailto:"))]
    missing = [link for link in links if not ((HOUSE / page).parent / link).exists()]
    assert not missing
