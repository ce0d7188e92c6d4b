"""The token bucket against a link that carries one byte after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.transfer.throttle import TokenBucket

POSTS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10_000)), min_size=1, max_size=30)


@given(POSTS, st.floats(10, 10_000))
def test_without_burst_it_is_a_link_that_serves_in_order(posts: list[tuple[float, int]], rate: float) -> None:
    bucket, now, free_at = TokenBucket(rate), 0.0, 0.0
    for pause, size in posts:
        now += pause
        free_at = max(free_at, now) + size / rate
        assert now + bucket.take(size, now) == pytest.approx(free_at)


@given(POSTS, st.floats(10, 10_000), st.floats(0, 20_000))
def test_no_stretch_of_time_passes_more_than_rate_and_burst_allow(
    posts: list[tuple[float, int]], rate: float, burst: float
) -> None:
    bucket, now = TokenBucket(rate, burst), 0.0
    let_through: list[tuple[float, int]] = []
    for pause, size in posts:
        now += pause
        let_through.append((now + bucket.take(size, now), size))
    for i, (begin, _) in enumerate(let_through):
        for j in range(i, len(let_through)):
            carried = sum(size for _, size in let_through[i + 1 : j + 1])
            assert carried <= burst + rate * (let_through[j][0] - begin) + 1e-3


@given(POSTS)
def test_rate_zero_is_no_limit(posts: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(0.0), 0.0
    for pause, size in posts:
        now += pause
        assert bucket.take(size, now) == 0.0
