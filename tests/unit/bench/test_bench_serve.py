from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest
from support.openai_server import answer_at_once, serving

from moonpool.bench.machine import machine_facts
from moonpool.bench.serve import BATCHES, LENGTHS, Samples, ServeOptions, figures, measure, serve, together_ms
from moonpool.bench.transformers_side import transformers_side
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer
from moonpool.loadgen.record import Outcome
from moonpool.loadgen.stream import StreamReading


def answer(*texts: float, tokens: int | None = None) -> Answer:
    return Answer(
        sent=0.0, ended=texts[-1], status=200, outcome=Outcome.OK,
        reading=StreamReading(texts=list(texts), completion_tokens=tokens or len(texts)),
    )  # fmt: skip


def steadily(start: float, step: float, count: int) -> Answer:
    return answer(*(start + i * step for i in range(count)))


def test_only_the_time_in_which_all_decode_counts() -> None:
    early, late = steadily(0.0, 0.1, 60), steadily(2.0, 0.1, 60)
    assert together_ms([early, late]) == pytest.approx(100, rel=0.05)
    alone = answer(*(i * 0.01 for i in range(100)), *(1.0 + i * 0.1 for i in range(1, 41)))  # fast until the other one joins
    assert together_ms([alone, steadily(1.0, 0.1, 60)]) == pytest.approx(100, rel=0.05)


def test_pieces_of_several_tokens_count_as_such() -> None:
    assert together_ms([answer(*(i * 0.2 for i in range(50)), tokens=100)]) == pytest.approx(100, rel=0.05)


def test_requests_that_never_decode_together_are_an_error() -> None:
    with pytest.raises(ConfigError, match="decoded together"):
        together_ms([steadily(0.0, 0.1, 40), steadily(3.0, 0.1, 40)])


def samples() -> Samples:
    found: Samples = {}
    for length in LENGTHS:
        found[f"ttft_{length}_ms"] = [length * 1.0, length * 1.2, length * 9.0]
        found[f"warm_ttft_{length}_ms"] = [length * 0.06] * 3
        found[f"warm_cached_{length}"] = [length - 1, length - 64, length - 1]
        found[f"transformers_ttft_{length}_ms"] = [length * 0.8] * 3
    for batch in BATCHES:
        found[f"tpot_{batch}_ms"] = [20.0 * batch] * 3
        found[f"transformers_tpot_{batch}_ms"] = [16.0 * batch] * 3
    return found


def test_figures_are_medians_and_ratios_under_the_documented_names() -> None:
    made = figures({"both": samples(), "split": samples()})
    assert made["ttft_2048_ms"] == made["both_ttft_2048_ms"] == made["split_ttft_2048_ms"] == pytest.approx(2048 * 1.2)
    assert made["warm_over_cold_ttft_2048"] == pytest.approx(0.05)
    assert made["warm_cached_512"] == 448
    assert made["ttft_2048_vs_transformers"] == pytest.approx(1.5)
    assert made["tpot_1_vs_transformers"] == made["split_tpot_16_vs_transformers"] == pytest.approx(1.25)
    assert made["both_transformers_tpot_4_ms"] == 64.0


@pytest.mark.parametrize(("options", "param"), [(ServeOptions("half"), "mode"), (ServeOptions(repeats=0), "repeats")])  # type: ignore[arg-type]
def test_options_that_cannot_be_meant_are_refused(options: ServeOptions, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(options)
    assert caught.value.param == param


def test_the_machine_is_described() -> None:
    facts = machine_facts()
    assert int(str(facts["cores"])) >= 1
    assert facts["torch"]


@pytest.mark.processes
def test_the_other_side_measures_in_a_process_of_its_own(tiny_model: Path) -> None:
    with transformers_side(tiny_model, 1) as side:
        assert side.threads == 1
        assert side.first_token_ms(32, seed=1) > 0
        assert isfinite(side.per_token_ms(2, 8, 16, seed=1))  # a difference of two times: below zero where others compute


@pytest.mark.processes
def test_an_other_side_that_cannot_load_its_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the transformers side ended"):
        with transformers_side(tmp_path, 1):
            pass


class Constant:
    def first_token_ms(self, tokens: int, seed: int) -> float:
        return 1.0

    def per_token_ms(self, batch: int, prompt: int, new: int, seed: int) -> float:
        return 1.0


async def test_every_figure_gets_its_samples_from_a_live_server() -> None:
    said: list[str] = []
    async with serving(answer_at_once) as (url, seen):
        with pytest.raises(ConfigError, match="decoded together"):  # all at once is no time between tokens
            await measure(url, Constant(), 1, said.append)
    assert len(said) == 2
    assert sorted({len(b["prompt"]) for b in seen.bodies}) == [128, 512, 2048]
