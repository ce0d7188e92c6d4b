"""The shared tier where KV bytes are encrypted."""

from __future__ import annotations

from pathlib import Path

from support.shared import SOON_S, is_right, reads, shared_tier, untouched, writes
from support.store import LAYOUT, block_bytes, block_keys

from moonpool.kvstore.sealing.keys import KvKey, KvKeys
from moonpool.kvstore.ssd.blocks import ReadEnd

FIRST, SECOND = KvKey.of(bytes(range(32))), KvKey.of(bytes(32))


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_one_node_wrote_another_one_with_the_key_reads_and_nobody_else(tmp_path: Path) -> None:
    async with shared_tier(tmp_path, "a", keys=KvKeys(FIRST)) as one:
        assert all(await one.write(writes("p", 3)))
    raw = b"".join(path.read_bytes() for path in objects(tmp_path))
    assert all(block_bytes(key)[:32].tobytes() not in raw and key not in raw for key in block_keys("p", 3))
    async with shared_tier(tmp_path, "b", keys=KvKeys(SECOND, FIRST)) as two:
        assert await two.exists(LAYOUT, block_keys("p", 3), SOON_S) == 3
        asked = reads("p", 3)
        assert await two.read(asked, SOON_S) == [ReadEnd.OK] * 3
        assert all(map(is_right, asked))
    async with shared_tier(tmp_path, "c", keys=KvKeys(SECOND)) as three:
        asked = reads("p", 3)
        assert await three.read(asked, SOON_S) == [ReadEnd.TORN] * 3
        assert all(map(untouched, asked))
        assert all(await three.write(writes("p", 3))), "who cannot read it writes it anew"
        assert await three.read(reads("p", 3), SOON_S) == [ReadEnd.OK] * 3


async def test_plain_and_encrypted_objects_do_not_see_one_another(tmp_path: Path) -> None:
    async with shared_tier(tmp_path, "a") as plain, shared_tier(tmp_path, "b", keys=KvKeys(FIRST)) as closed:
        assert all(await plain.write(writes("p", 2)))
        assert await closed.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0
        assert await closed.read(reads("p", 2), SOON_S) == [ReadEnd.GONE] * 2
        assert all(await closed.write(writes("q", 1)))
        assert await plain.exists(LAYOUT, block_keys("q", 1), SOON_S) == 0


async def test_an_object_put_under_another_name_or_flipped_is_a_miss(tmp_path: Path) -> None:
    async with shared_tier(tmp_path, "a", keys=KvKeys(FIRST)) as tier:
        assert all(await tier.write(writes("p", 2)))
        paths = {path.name: path for path in objects(tmp_path)}
        first, second = (paths[key.hex()] for key in block_keys("p", 2))
        first.write_bytes(second.read_bytes())
        raw = bytearray(second.read_bytes())
        raw[-1] ^= 1
        second.write_bytes(raw)
        asked = reads("p", 2)
        assert await tier.read(asked, SOON_S) == [ReadEnd.TORN] * 2
        assert all(map(untouched, asked))
