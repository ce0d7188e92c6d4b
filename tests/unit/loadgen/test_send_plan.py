from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import ConfigError
from moonpool.loadgen.plan import Scaling, plan_sends, scaled_length
from moonpool.loadgen.trace import Trace, TraceRow


def trace_of(*timestamps: float, tokens: int = 700, output: int = 10) -> Trace:
    ids = tuple(range(-(-tokens // 512)))
    return Trace(tuple(TraceRow(t, tokens, output, ids, i + 1) for i, t in enumerate(timestamps)), 512)


def times(trace: Trace, **scaling: float | bool) -> list[float]:
    return [round(s.at_s, 6) for s in plan_sends(trace, Scaling(**scaling)).sends]  # type: ignore[arg-type]


def test_the_first_row_goes_out_at_once_and_the_rest_keep_their_distance() -> None:
    assert times(trace_of(5_000, 5_250, 7_000)) == [0, 0.25, 2]
    assert times(trace_of(5_000, 5_250, 7_000), speed=20) == [0, 0.0125, 0.1]


def test_loops_join_with_one_mean_gap_and_are_scaled_alike() -> None:
    assert times(trace_of(0, 100, 200), loops=2) == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert times(trace_of(0, 100, 200), loops=2, speed=10) == [0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert [s.loop for s in plan_sends(trace_of(0, 1), Scaling(loops=2)).sends] == [0, 0, 1, 1]


def test_rows_of_one_timestamp_go_out_at_once_in_file_order() -> None:
    plan = plan_sends(trace_of(*[0] * 50, 1, *[1] * 30), Scaling())
    assert [s.at_s for s in plan.sends] == [0] * 50 + [0.001] * 31
    assert [s.row for s in plan.sends] == list(range(1, 82))


def test_spreading_fills_the_gap_to_the_next_timestamp() -> None:
    assert times(trace_of(0, 0, 0, 3_000, 3_000, 5_000, 5_000), spread=True) == [0, 1, 2, 3, 4, 5, 6]
    assert times(trace_of(7, 7, 7), spread=True) == [0, 0, 0]


def test_sizes_follow_the_block_size_and_outputs_the_divisor() -> None:
    plan = plan_sends(trace_of(0, tokens=1_025, output=100), Scaling(block_tokens=32, output_divisor=16))
    (send,) = plan.sends
    assert (send.input_tokens, send.output_tokens, send.block_tokens, send.hash_ids) == (65, 6, 32, (0, 1, 2))


def test_an_output_that_shrinks_to_nothing_is_one_token_and_counted() -> None:
    plan = plan_sends(trace_of(0, 1, output=3), Scaling(output_divisor=4))
    assert [s.output_tokens for s in plan.sends] == [1, 1]
    assert plan.outputs_raised == 2
    assert plan_sends(trace_of(0, output=0), Scaling()).sends[0].output_tokens == 1


def test_a_limit_keeps_the_first_rows() -> None:
    assert len(plan_sends(trace_of(0, 1, 2, 3), Scaling(limit=3, loops=2)).sends) == 6


@given(st.integers(1, 200_000), st.sampled_from([16, 64, 512]), st.integers(1, 1_024))
def test_scaling_a_length_keeps_the_number_of_blocks(tokens: int, from_block: int, to_block: int) -> None:
    scaled = scaled_length(tokens, from_block, to_block)
    assert -(-scaled // to_block) == -(-tokens // from_block)
    assert scaled_length(tokens, from_block, from_block) == tokens


@pytest.mark.parametrize(
    ("scaling", "param"),
    [
        (Scaling(speed=0), "speed"),
        (Scaling(speed=float("inf")), "speed"),
        (Scaling(speed=float("nan")), "speed"),
        (Scaling(block_tokens=-1), "block_tokens"),
        (Scaling(output_divisor=0), "output_divisor"),
        (Scaling(limit=-1), "limit"),
        (Scaling(loops=0), "loops"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(scaling: Scaling, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sends(trace_of(0), scaling)
    assert caught.value.param == param
