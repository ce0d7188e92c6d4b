from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import psutil
import pytest

from moonpool.bench.path import PathOptions
from moonpool.bench.path_steps import SENT, STEPS, TEXT, Mode, Point, Step, middle, steps_ms
from moonpool.bench.path_usage import Watched
from moonpool.core.errors import ConfigError


def chain(mode: Mode) -> Sequence[Step]:
    return [step for step in STEPS[mode] if not step.inside]


def points(mode: Mode) -> dict[Point, float]:
    """Every instant a millisecond after the one before; the conductor decides for half of one."""
    found: dict[Point, float] = {("client", SENT): 100.0}
    for number, step in enumerate(chain(mode), start=1):
        found[step.end] = 100.0 + number / 1e3
    return found | {("conductor", "arrived"): 100.0051, ("conductor", "placed"): 100.0056}


@pytest.mark.parametrize("mode", get_args(Mode))
def test_steps_follow_one_another_from_the_clients_request_to_its_first_text(mode: Mode) -> None:
    steps = chain(mode)
    assert steps[0].begin == ("client", SENT)
    assert steps[-1].end == ("client", TEXT)
    assert all(one.end == following.begin for one, following in pairwise(steps))
    assert len({step.name for step in STEPS[mode]}) == len(STEPS[mode])


@pytest.mark.parametrize("mode", get_args(Mode))
def test_steps_sum_up_to_the_whole(mode: Mode) -> None:
    took = steps_ms(mode, points(mode))
    assert sum(took[step.name] for step in chain(mode)) == pytest.approx(took["whole"])
    assert took["decide"] == pytest.approx(0.5)


def test_an_instant_that_nobody_told_is_named() -> None:
    lacking = points("split")
    del lacking["prefill", "landing_granted"]
    with pytest.raises(ConfigError, match="no prefill told when a request was 'landing_granted'"):
        steps_ms("split", lacking)


def test_each_step_is_the_median_of_its_own_samples() -> None:
    assert middle([{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]) == {"a": 3.0, "b": 4.0}


def test_cpu_of_processes_in_one_role_is_added_up() -> None:
    me = psutil.Process()
    alone, twice = Watched((("client", me),)).cpu_s(), Watched((("client", me), ("client", me))).cpu_s()
    assert 0 < alone["client"] < twice["client"]


@pytest.mark.parametrize(("options", "named"), [(PathOptions(mode="neither"), "mode"), (PathOptions(repeats=0), "repeats")])  # type: ignore[arg-type]
def test_options_out_of_range_are_refused_by_name(options: PathOptions, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options.check()
    assert refused.value.param == named
