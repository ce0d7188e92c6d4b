"""The bench of carriers, run small: its figures are of this run, its sides leave nothing."""

from __future__ import annotations

import pytest

from moonpool.bench.carrier import carrier
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError


@pytest.mark.processes
def test_plain_sockets_and_mapped_memory_are_measured_against_a_line() -> None:
    found = carrier(only=("tcp", "segment"), repeats=1, turn_bytes=16 * MIB, deaths=1, say=lambda line: None)
    for end in ("", "_64k", "_16m", "_small"):
        assert all(found[f"{name}_gbs{end}"] > 0 for name in ("line", "tcp", "segment"))
        assert found[f"tcp_vs_line{end}"] > 0
    assert found["transport"] == {"tcp": "tcp", "segment": "mmap"}
    assert found["peer"] == "not given"
    assert 0 < found["peer_death_ms"] < 5_000


def test_an_unknown_carrier_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is no carrier"):
        carrier(only=("pigeon",))
    with pytest.raises(ConfigError, match="repeats: 0"):
        carrier(repeats=0)
