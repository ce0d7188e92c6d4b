from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moonpool.bench.ssd import SsdOptions, ssd
from moonpool.core.config import MIB
from moonpool.core.errors import InvalidRequest


def test_without_fio_the_ratios_are_null_and_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    figures = ssd(SsdOptions(str(tmp_path), seconds=0.1, rounds=1, file_bytes=400 * MIB))
    assert figures["write_vs_fio"] is None
    assert figures["read_cold_vs_fio"] is None
    assert "fio is not installed" in figures["reason"]
    assert figures["write_gbs"] > 0
    assert figures["read_gbs"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_with_fio_both_sides_are_measured_in_one_run(tmp_path: Path) -> None:
    figures = ssd(SsdOptions(str(tmp_path), seconds=0.1, rounds=2, file_bytes=400 * MIB))
    assert figures["fio"].startswith("fio-")
    assert "reason" not in figures
    assert all(figures[f"{what}_vs_fio"] > 0 for what in ("write", "read", "write_cold", "read_cold"))
    assert {len(rates) for rates in figures["rounds"].values()} == {2}


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--path: .*missing"):
        ssd(SsdOptions(str(tmp_path / "missing")))
