from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.hits import hit_quantum, usable


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 1), (1, 1), (16, 1), (17, 2), (64, 4), (65, 5)])
def test_a_quantum_is_whole_blocks_and_at_least_one(tokens: int, blocks: int) -> None:
    assert hit_quantum(tokens, 16) == blocks


@given(blocks=st.integers(0, 1_000), tokens=st.integers(0, 5_000), size=st.sampled_from([16, 64]))
def test_less_than_a_quantum_is_never_used_and_never_more_than_there_is(blocks: int, tokens: int, size: int) -> None:
    used = usable(blocks, hit_quantum(tokens, size))
    assert used <= blocks
    assert used == 0 or used * size >= tokens
    assert blocks - used < hit_quantum(tokens, size)
