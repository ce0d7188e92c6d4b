"""What a measurement in this process logs goes to standard error, whatever that is when it is logged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from typer.testing import CliRunner

from moonpool.cli.bench import bench


@pytest.fixture(autouse=True)
def configured_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_logs_after_a_measurement_do_not_go_to_the_stream_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(bench, ["placement", "--help"]).exit_code == 0
    CliRunner().invoke(bench, ["between", "--carrier", "pigeon"])
    structlog.get_logger("later").warning("still here")
    shown = capsys.readouterr()
    assert "still here" in shown.err
    assert not shown.out
