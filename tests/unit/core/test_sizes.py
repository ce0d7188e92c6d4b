from __future__ import annotations

import pytest

from moonpool.core.sizes import sized


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0.0 MiB"),
        (1, "0.0 KiB"),
        (20_480, "20.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (5 << 30, "5120.0 MiB"),
    ],
)
def test_bytes_of_small_things_are_not_told_as_none(count: int, words: str) -> None:
    assert sized(count) == words
