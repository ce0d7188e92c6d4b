"""How much of a file system the tier may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ssd import NODE, SMALL, put, tier

from moonpool.core.config import GIB, MIB
from moonpool.kvstore.ssd.device import Device, size_words

TIB = 1 << 40


@pytest.mark.parametrize(
    ("total", "free", "spare"),
    [
        (100 * MIB, 50 * MIB, 45 * MIB),
        (10 * GIB, 10 * GIB, 10 * GIB - GIB // 2),
        (16 * GIB, 10 * GIB, 9 * GIB),
        (100 * GIB, 60 * GIB, 55 * GIB),
        (100 * GIB, 5 * GIB, 0),
        (100 * GIB, 3 * GIB, 0),
        (0, 0, 0),
    ],
)
def test_a_twentieth_of_a_file_system_and_a_gib_of_a_large_one_stay_free(total: int, free: int, spare: int) -> None:
    device = Device(total, free)
    assert device.spare == spare
    device.require(spare)
    with pytest.raises(OSError, match="stay free for others"):
        device.require(spare + 1)


def test_what_was_promised_but_not_set_aside_counts_too() -> None:
    with pytest.raises(OSError, match=r"5\.0 GiB of the file system stay free for others"):
        Device(100 * GIB, 60 * GIB).require(2 * MIB, MIB)


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0.0 MiB"), (8 * MIB, "8.0 MiB"), (50 * GIB, "50.0 GiB"), (900 * TIB, "900.0 TiB")]
)
def test_sizes_are_said_in_units_people_read(size: int, words: str) -> None:
    assert size_words(size) == words


async def test_the_start_says_in_one_line_what_there_is(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    assert of.line == f"ssd: 8.0 MiB at {tmp_path / NODE}, 8 segments, 0 blocks found"
    await put(of, SMALL, range(12))
    await of.close()
    again = await tier(tmp_path)
    assert again.line.endswith("8 segments, 12 blocks found")
    await again.close()


@pytest.mark.parametrize(
    ("free", "held", "size"),
    [
        (100 * GIB, 0, 25 * GIB),
        (75 * GIB, 25 * GIB, 25 * GIB),
        (0, 25 * GIB, 25 * GIB),
        (800 * GIB, 0, 64 * GIB),
        (0, 200 * GIB, 64 * GIB),
    ],
)
def test_without_a_size_a_quarter_is_taken_and_kept_and_64_gib_at_most(free: int, held: int, size: int) -> None:
    assert Device(900 * GIB, free).default(held, held) == size
