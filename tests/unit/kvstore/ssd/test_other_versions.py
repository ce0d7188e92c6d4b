"""What an upgrade and a roll-back find on disks: bytes of another version of the format are given up, never read as KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shared import SOON_S, reads, shared_tier, untouched
from support.shared import writes as shared_writes
from support.ssd import SMALL, found, keys, put, right, tier
from support.store import LAYOUT, block_keys

from moonpool.kvstore.ssd import format as ssd_format
from moonpool.kvstore.ssd.blocks import ReadEnd


@pytest.mark.parametrize("other", [ssd_format.VERSION - 1, ssd_format.VERSION + 1])
async def test_ssd_files_of_another_version_are_removed_at_start_and_said(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(ssd_format, "VERSION", other)
        of = await tier(tmp_path)
        await put(of, SMALL, range(10))
        await of.close()
        again = await tier(tmp_path)
        assert set(found(again)) == keys(range(10)), "its own version finds them"
        await again.close()
    now = await tier(tmp_path)
    assert found(now) == {}
    assert "carries no header of this version" in " ".join(now.words().values())
    placed = await put(now, SMALL, range(10))
    assert await right(now, SMALL, placed) == set(range(10))
    await now.close()


@pytest.mark.parametrize("other", [ssd_format.VERSION - 1, ssd_format.VERSION + 1])
async def test_objects_of_another_version_on_the_shared_tier_are_misses(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(ssd_format, "VERSION", other)
        async with shared_tier(tmp_path) as old:
            assert await old.write(shared_writes("p", 3)) == [True] * 3
    async with shared_tier(tmp_path, "b") as new:
        wanted = reads("p", 3)
        assert set(await new.read(wanted, SOON_S)) <= {ReadEnd.TORN, ReadEnd.GONE}
        assert all(untouched(read) for read in wanted)
        assert await new.exists(LAYOUT, block_keys("p", 3), SOON_S) in (0, 3)
