from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.security import SecurityOptions, security
from moonpool.core.errors import ConfigError


def test_rates_come_as_ratios_of_one_run_beside_what_a_core_can_encrypt(tmp_path: Path) -> None:
    figures = security(SecurityOptions(str(tmp_path), seconds=0.02, rounds=1, cluster_rounds=0), say=lambda line: None)
    for turn in ("carrier_push", "ssd_write", "ssd_read", "shared_write", "shared_read"):
        assert figures[f"{turn}_plain_gbs"] > 0 and figures[f"{turn}_encrypted_gbs"] > 0
        assert figures[f"{turn}_encrypted_vs_plain"] > 0
    assert figures["aes_gbs"] > 0
    assert not any(name.startswith("ttft") for name in figures)
    assert list(tmp_path.iterdir()) == []


def test_options_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 or more are needed"):
        security(SecurityOptions(rounds=0))
