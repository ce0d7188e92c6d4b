from __future__ import annotations

import pytest

from moonpool.bench.sharing import WAYS, SharingOptions, _told, _Window, figures
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer
from moonpool.loadgen.record import Outcome
from moonpool.loadgen.stream import StreamReading


def prompt(seconds: float) -> Answer:
    return Answer(sent=1.0, ended=9.0, status=200, outcome=Outcome.OK, reading=StreamReading(texts=[1.0 + seconds]))


def test_figures_are_medians_of_rounds_under_the_documented_names() -> None:
    busy, quiet = _Window(10.0, [20.0] * 90 + [100.0] * 10), _Window(3.0, [10.0] * 20)
    told = _told([(2_048, prompt(1.5)), (4_096, prompt(4.0)), (2_048, prompt(2.5))], busy, quiet, 900.0)
    assert told == {
        "prompt_tok_s": pytest.approx(819.2),
        "ttft_2048_ms": pytest.approx(2_000.0),
        "ttft_4096_ms": pytest.approx(4_000.0),
        "gap_p50_ms": 20.0,
        "gap_p99_ms": pytest.approx(100.0),
        "tbt_ms": pytest.approx(100.0),
        "alone_ttft_2048_ms": 900.0,
        "alone_gap_p50_ms": 10.0,
    }
    made = figures({"both": [{"tbt_ms": 1.0}, {"tbt_ms": 3.0}, {"tbt_ms": 2.0}], "split": []})
    assert made == {"both_tbt_ms": 2.0}


@pytest.mark.parametrize(
    ("given", "field"), [({"ways": ("alone",)}, "way"), ({"answers": 0}, "answers"), ({"rounds": 0}, "rounds")]
)
def test_bad_options_are_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        SharingOptions(**given).check()  # type: ignore[arg-type]


def test_every_way_is_a_configuration() -> None:
    for _, settings in WAYS.values():
        for key in settings:
            section, name = key.split(".")
            assert hasattr(getattr(Config(), section), name)
