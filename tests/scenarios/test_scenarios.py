"""Scenarios in words: facts (``>``) told to a pure part, and the golden log of what it answers (``<``) and is (``=``).

A file begins with the part and its options; the log is checked line by line. MOONPOOL_REWRITE_SCENARIOS=1 writes the
logs anew from the facts: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from actors import make, told

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def replay(text: str) -> str:
    """The scenario with its log as it really is. Comments and blank lines stay; each paragraph begins a new actor."""
    lines, actor = [], None
    for line in text.splitlines():
        if line.startswith(("<", "=")):
            continue
        lines.append(line)
        if line.startswith(">"):
            assert actor is not None, f"a fact before the part: {line}"
            lines += [f"< {action}" for action in told(actor, line[1:].strip())]
            lines.append(f"= {actor.state()}")
        elif line and not line.startswith("#"):
            kind, *options = line.split()
            actor = make(kind, {name: int(value) for name, _, value in (o.partition("=") for o in options)})
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_goes_as_its_log_says(file: Path) -> None:
    expected = file.read_text()
    actual = replay(expected)
    if os.environ.get("MOONPOOL_REWRITE_SCENARIOS"):
        file.write_text(actual)
    assert actual.splitlines() == expected.splitlines()
