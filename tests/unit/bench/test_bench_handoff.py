"""The hand-off measurement on short prompts: the figures are what they are called, not how good they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.handoff import handoff
from moonpool.core.errors import ConfigError


@pytest.mark.model
@pytest.mark.processes
def test_exposed_pushes_and_bytes_on_the_wire_are_measured(model_dir: Path) -> None:
    found = handoff("ucx", str(model_dir), repeats=1, tokens=256, lengths=(130,), say=lambda line: None)
    fractions = ("exposed_fraction", "exposed_fraction_bulk", "exposed_fraction_unthrottled")
    assert all(0.0 < found[name] < 10.0 for name in fractions)
    assert (found["carrier"], found["transport"]) == ("ucx", "tcp")
    assert 1.0 < found["wire_overhead"] == found["wire_overhead_130"] < 1.02
    assert found["wire_overhead_17"] > 1.0


def test_a_carrier_that_joins_no_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="'memory' does not join two processes"):
        handoff("memory")
    with pytest.raises(ConfigError, match="repeats: 0"):
        handoff("ucx", repeats=0)
