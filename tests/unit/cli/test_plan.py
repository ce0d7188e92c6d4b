from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.cli.main import Choices, build
from moonpool.cli.plan import PROFILES
from moonpool.core.errors import ConfigError

MODEL = Path(__file__).parents[2] / "fixtures/llama-3-70b"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build(Choices()), ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def told(*arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


def test_llama_3_70b_on_the_papers_nodes() -> None:
    for machine, rate in (("a800x8", 5.9e9), ("h800x8", 18.6e9)):
        answer = told(MODEL, "--machine", machine, "--length", 8_192, "--length", 131_072)
        assert answer["kv_bytes_per_token"] == 327_680
        short, long = answer["prefill"]
        assert long["kv_bytes"] == pytest.approx(42.9e9, rel=0.002)
        assert short["break_even_at_peak_bytes_per_s"] == pytest.approx(rate, rel=0.01)
        assert short["fetch_pays_over"] == ["network", "host", "ssd"]


def test_the_table_says_the_same_for_people() -> None:
    text = run(MODEL, "--machine", "a800x8", "--length", 8_192)
    for part in ("327,680 B", "141.1 GB", "8,192", "5.9 GB/s", "decode step"):
        assert part in text


def test_weights_that_do_not_fit_are_said_to() -> None:
    text = run(MODEL / "config.json", "--machine", "h200")
    assert "the weights do not fit" in text
    assert "does not fit" in text


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    slow = (PROFILES / "a800x8.toml").read_text().replace("network_bytes_per_s = 100e9", "network_bytes_per_s = 1e9")
    file = tmp_path / "ours.toml"
    file.write_text(slow)
    answer = told(MODEL, "--machine", file, "--length", 8_192)
    assert answer["prefill"][0]["fetch_pays_over"] == ["host", "ssd"]


@pytest.mark.parametrize(
    ("profile", "named"),
    [
        ("speed = 3", "speed"),
        ('devices = "eight"', "devices"),
        ("devices = -1", "devices"),
        ('name = "x"', "devices, flops, .*a800x8.toml"),
        ("flops = 0", "flops is 0; a number that is above 0"),
        ("flops = nan", "flops is nan"),
        ("memory_efficiency = 75", "memory_efficiency is 75; .* at most 1"),
        ("= nonsense", "ours.toml"),
    ],
    ids=["unknown field", "a word", "negative", "incomplete", "no rate", "no number", "per cent", "no TOML"],
)
def test_a_bad_machine_is_named_with_its_field(tmp_path: Path, profile: str, named: str) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(profile)
    with pytest.raises(ConfigError, match=named):
        run(MODEL, "--machine", file)


def test_a_bad_model_or_length_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    for arguments in ((tmp_path,), (tmp_path / "nowhere",)):
        with pytest.raises(ConfigError, match="MODEL_DIR"):
            run(*arguments)
    with pytest.raises(ConfigError, match="--length"):
        run(MODEL, "--length", 0)
    with pytest.raises(ConfigError, match="--kv-dtype"):
        run(MODEL, "--kv-dtype", "int3")
