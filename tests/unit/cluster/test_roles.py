from __future__ import annotations

from moonpool.cluster.roles import Touched

GIB = 1 << 30


def test_taking_memory_is_told_at_most_once_a_second_and_not_where_it_takes_less() -> None:
    said: list[str] = []
    now = 100.0
    touched = Touched(said.append, lambda: now)
    for step in range(1, 30):
        now += 1 / 8
        touched(step * GIB // 8, 4 * GIB)
    assert said == [
        "pool: 1.0 of 4.0 GiB of memory taken",
        "pool: 2.0 of 4.0 GiB of memory taken",
        "pool: 3.0 of 4.0 GiB of memory taken",
    ]
