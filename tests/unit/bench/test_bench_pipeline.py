from __future__ import annotations

import pytest

from moonpool.bench.pipeline import PipelineOptions, figures
from moonpool.core.errors import ConfigError


def test_the_predicted_factor_is_that_of_the_longer_span_and_one_layer() -> None:
    samples = {"one": [9.0, 8.0, 99.0], "group": [5.0], "first_span": [4.0], "second_span": [4.4]}
    found = figures(samples, layers=10)
    assert found["one_ttft_ms"] == 9_000
    assert found["factor"] == pytest.approx(1.8)
    assert found["predicted_factor"] == pytest.approx(9.0 / 4.8)


@pytest.mark.parametrize(
    ("options", "field"), [(PipelineOptions(repeats=0), "repeats"), (PipelineOptions(tokens=255), "tokens")]
)
def test_what_cannot_be_measured_is_refused_before_a_cluster_starts(options: PipelineOptions, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options.check()
    assert caught.value.param == field
