"""Blocks written, read, found again: the tier as the pool sees it."""

from __future__ import annotations

from pathlib import Path

from support.ssd import OTHER, SMALL, key, right, tier, writes


async def test_what_was_written_is_read_and_found_after_a_restart(tmp_path: Path) -> None:
    first = await tier(tmp_path, SMALL, OTHER)
    assert first.recovered == []
    room = first.room(SMALL)
    extents = await first.write(writes(SMALL, range(20), chain=True) + writes(OTHER, range(5), chain=True))
    assert None not in extents
    placed = {n: e for n, e in enumerate(extents) if e is not None}
    assert await right(first, SMALL, {n: placed[n] for n in range(20)}) == set(range(20))
    assert await right(first, OTHER, {n: placed[20 + n] for n in range(5)}) == set(range(5))
    assert first.room(SMALL) < room - 20
    await first.close()
    second = await tier(tmp_path, SMALL, OTHER)
    found = {(b.layout, b.key): b.extent for b in second.recovered}
    assert found == {
        **{(SMALL.fingerprint, key(n)): placed[n] for n in range(20)},
        **{(OTHER.fingerprint, key(n)): placed[20 + n] for n in range(5)},
    }
    assert await right(second, SMALL, {n: placed[n] for n in range(20)}) == set(range(20))
    await second.close()
