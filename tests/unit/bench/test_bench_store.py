from __future__ import annotations

import sys

import pytest

from moonpool.bench import store as bench
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError


def test_every_figure_is_measured_and_a_peer_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", {"64k": (64 << 10, 8), "": (MIB, 4), "16m": (4 * MIB, 2)})
    monkeypatch.setattr(bench, "COLD_BYTES", MIB)
    monkeypatch.setattr(bench, "EXISTS_BATCH", 256)
    said: list[str] = []
    found = bench.store(repeats=1, peer_python=sys.executable, say=said.append)
    promised = [name for line in (bench.__doc__ or "").splitlines() if line.startswith("    ") for name in line.split()[:1]]
    assert {name.rstrip(",") for name in promised} - {"mooncake_put_gbs", "mooncake_exists_us"} <= found.keys()
    for way in ("put", "get"):
        for end in ("", "_64k", "_16m"):
            assert found[f"{way}_vs_copy_digest{end}"] > 0
            assert found[f"{way}_vs_memcpy{end}"] > 0
    assert found["exists_us"] > 0 and found["exists_batched_per_s"] > 0
    assert "mooncake" not in found["peer"]
    assert any(line.startswith("mooncake:") for line in said)


def test_no_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeats"):
        bench.store(repeats=0)
