from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvstore.eviction.sketch import MOST, WINDOW, FrequencySketch

KEYS = st.lists(st.binary(min_size=16, max_size=16) | st.sampled_from([bytes([i]) * 16 for i in range(4)]), max_size=300)


@given(KEYS, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_key_is_undercounted_before_the_counters_age(keys: list[bytes], seed: int) -> None:
    sketch = FrequencySketch(100, seed)
    sketch.add(keys)
    for key, count in Counter(keys).items():
        assert sketch.estimate(key) >= min(count, MOST)


def test_keys_within_the_capacity_are_mostly_told_apart() -> None:
    sketch = FrequencySketch(1_000)
    keys = [i.to_bytes(16, "big") for i in range(1_000)]
    sketch.add(keys)
    assert sum(sketch.estimate(key) == 1 for key in keys) > 950
    assert sum(sketch.estimate((5_000 + i).to_bytes(16, "big")) == 0 for i in range(1_000)) > 900


def test_old_heat_fades() -> None:
    sketch = FrequencySketch(64)
    sketch.add([b"hot"] * 12)
    assert sketch.estimate(b"hot") == 12
    sketch.add([i.to_bytes(4, "big") for i in range(WINDOW * 64)])
    assert 6 <= sketch.estimate(b"hot") <= 7


def test_its_size_is_bounded_by_the_capacity() -> None:
    assert len(FrequencySketch(1 << 16)) == 8 * (1 << 16)
