"""The SSD tier where KV bytes are encrypted: what a disk shows, and what becomes of files of another key or of none."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ssd import NODE, OTHER, SMALL, config, content, flip, found, key, peek, poke, put, read, right, tier, writes
from support.ssd import keys as keys_of

from moonpool.core.use import Use
from moonpool.kvstore.sealing.keys import KvKey, KvKeys
from moonpool.kvstore.sealing.stream import TAG_BYTES
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.format import HEADER_BYTES, MAX_LAYERS, MAX_TEXT_BYTES, ExtentHeader, extent_bytes
from moonpool.kvstore.ssd.tier import SsdTier

FIRST, SECOND = KvKey.of(bytes(range(32))), KvKey.of(bytes(32))
KEYS = KvKeys(FIRST)
LOUD = Use("a tenant nobody shall know", "chat", 3, 7)


async def test_blocks_come_back_over_restarts_and_moves_and_nothing_of_them_shows_on_the_disk(tmp_path: Path) -> None:
    of = await tier(tmp_path, SMALL, OTHER, keys=KEYS)
    placed = await put(of, SMALL, range(30))
    (loud,) = await of.write(writes(SMALL, [99], use=LOUD))
    assert loud is not None
    assert await right(of, SMALL, placed) == set(range(30))
    await of.close()
    again = await tier(tmp_path, keys=KEYS)
    assert found(again).keys() == keys_of([*range(30), 99])
    assert await right(again, SMALL, placed) == set(range(30))
    assert {block.use for block in again.recovered if block.key == key(99)} == {LOUD}
    await again.close()
    raw = b"".join(path.read_bytes() for path in (tmp_path / NODE).glob("segment-*"))
    assert LOUD.tenant.encode() not in raw and key(3) not in raw
    assert all(content(SMALL, key(n))[:32].tobytes() not in raw for n in range(30))


async def test_moved_blocks_are_sealed_anew_in_their_new_place(tmp_path: Path) -> None:
    of = await tier(tmp_path, SMALL, OTHER, keys=KEYS)
    moved: dict[int, int] = {}
    of.on_moved = moved.update
    full = await put(of, SMALL, range(of.room(SMALL)))
    of.free([extent for n, extent in full.items() if n % 3])
    kept = {n: extent for n, extent in full.items() if not n % 3}
    assert await of.compact(OTHER) and moved
    assert await right(of, SMALL, {n: moved.get(extent, extent) for n, extent in kept.items()}) == set(kept)
    await of.close()


@pytest.mark.parametrize("at", [9, 30, 44, 60, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 777, extent_bytes(SMALL) - 1])
async def test_a_flipped_bit_anywhere_is_a_miss(at: int, tmp_path: Path) -> None:
    of = await tier(tmp_path, keys=KEYS)
    placed = await put(of, SMALL, range(4))
    flip(tmp_path, SMALL, placed[2], at)
    assert await read(of, SMALL, {2: placed[2]}) == {2: ReadEnd.TORN}
    assert await right(of, SMALL, {n: placed[n] for n in (0, 1, 3)}) == {0, 1, 3}
    await of.close()


async def test_a_sealed_block_moved_to_another_place_is_a_miss(tmp_path: Path) -> None:
    of = await tier(tmp_path, keys=KEYS)
    placed = await put(of, SMALL, range(4))
    one, two = (peek(tmp_path, SMALL, placed[n]) for n in (1, 2))
    poke(tmp_path, SMALL, placed[0], one)  # header and all
    poke(tmp_path, SMALL, placed[1], two[HEADER_BYTES:], at=HEADER_BYTES)  # bytes alone
    got = await read(of, SMALL, {0: placed[0], 1: placed[1], 2: placed[2]})
    assert got[0] is ReadEnd.TORN and got[1] is ReadEnd.TORN and not isinstance(got[2], ReadEnd)
    await of.close()


async def test_plain_and_encrypted_files_never_mix(tmp_path: Path) -> None:
    plain = await tier(tmp_path)
    await put(plain, SMALL, range(3))
    await plain.close()
    of = await tier(tmp_path, keys=KEYS)
    assert not of.recovered and "its blocks are not encrypted" in of.words()["ssd_notes"]
    placed = await put(of, SMALL, range(3))
    await of.close()
    back = await tier(tmp_path)
    assert not back.recovered and "its blocks are encrypted" in back.words()["ssd_notes"]
    await back.close()
    assert placed


async def test_plain_blocks_smuggled_into_an_encrypted_file_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = await tier(tmp_path / "plain")
    theirs = await put(plain, SMALL, [5])
    raw = peek(tmp_path / "plain", SMALL, theirs[5])
    await plain.close()
    of = await tier(tmp_path, keys=KEYS)
    mine = await put(of, SMALL, [5])
    poke(tmp_path, SMALL, mine[5], raw)
    assert await read(of, SMALL, mine) == {5: ReadEnd.TORN}
    await of.close()


async def test_the_key_before_opens_what_it_sealed_and_an_unknown_one_is_named_and_its_room_used(tmp_path: Path) -> None:
    of = await tier(tmp_path, keys=KEYS)
    old = await put(of, SMALL, range(5))
    await of.close()
    rotated = await tier(tmp_path, keys=KvKeys(SECOND, FIRST))
    assert found(rotated).keys() == keys_of(range(5))
    new = await put(rotated, SMALL, range(5, 9))
    assert await right(rotated, SMALL, old | new) == set(range(9))
    await rotated.close()
    late = await tier(tmp_path, keys=KvKeys(SECOND))
    assert found(late).keys() == keys_of(range(5, 9)), "what only the dropped key opens is gone"
    assert FIRST.id in late.words()["ssd_notes"]
    await put(late, SMALL, range(20, 20 + late.room(SMALL)))
    await late.close()


texts = st.text("aé漢", max_size=100)
headers = st.builds(
    ExtentHeader,
    segment=st.integers(0, 1 << 20),
    position=st.integers(0, 1 << 20),
    epoch=st.integers(0, 1 << 63),
    sequence=st.integers(0, 1 << 63),
    layout=st.sampled_from([SMALL.fingerprint, OTHER.fingerprint]),
    key=st.binary(min_size=16, max_size=16),
    parent=st.one_of(st.none(), st.binary(min_size=16, max_size=16).filter(any)),
    use=st.builds(Use, texts, st.text("ab", max_size=MAX_TEXT_BYTES), st.integers(0, 99), st.integers(0, 99)),
    digests=st.lists(st.integers(0, (1 << 64) - 1), max_size=MAX_LAYERS).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(headers, st.integers(0, 9))
def test_what_is_sealed_opens_to_the_same_and_only_as_itself(header: ExtentHeader, seed: int) -> None:
    vault, slot = Vault(KEYS), np.random.default_rng(seed).integers(0, 256, 8192, np.uint8)
    out = np.zeros(slot.nbytes + TAG_BYTES, np.uint8)
    raw = vault.seal(header, slot, out)
    assert len(raw) == HEADER_BYTES
    other = Vault(KEYS)  # another process with the same key
    sealed = other.open_header(raw)
    assert sealed is not None and sealed.header == header
    back = np.zeros_like(slot)
    assert other.open_slot(sealed, out.copy(), back) and (back == slot).all()
    assert (
        not other.open_slot(replace(sealed, header=replace(header, key=b"x" * 16)), out.copy(), back) or header.key == b"x" * 16
    )
    assert Vault(KvKeys(SECOND)).open_header(raw) is None


def test_the_same_block_sealed_again_never_looks_the_same_and_no_nonce_comes_twice() -> None:
    vault, slot = Vault(KEYS), np.zeros(8192, np.uint8)
    header = ExtentHeader(1, 2, 3, 4, SMALL.fingerprint, key(1), None, Use(), (1, 2))
    fronts, slots = set(), set()
    for life in (vault, vault, Vault(KEYS)):
        out = np.zeros(slot.nbytes + TAG_BYTES, np.uint8)
        fronts.add(life.seal(header, slot, out)[:44])
        slots.add(out.tobytes())
    assert len(fronts) == 3 and len(slots) == 3


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 30))
def test_any_page_is_a_header_or_none(seed: int, flips: int) -> None:
    dice, vault = random.Random(seed), Vault(KEYS)
    header = ExtentHeader(1, 2, 3, 4, SMALL.fingerprint, key(1), None, Use(), (1, 2))
    page = bytearray(vault.seal(header, np.zeros(64, np.uint8), np.zeros(64 + TAG_BYTES, np.uint8)))
    for _ in range(flips):
        page[dice.randrange(len(page))] ^= dice.randrange(1, 256)
    found = vault.open_header(bytes(page))
    assert found is None or found.header == header  # flips may undo one another
    assert vault.open_header(bytes(page[: dice.randrange(len(page))])) is None


@pytest.mark.parametrize("zeroise", [False, True])
async def test_an_erased_block_leaves_nothing_where_asked_for(tmp_path: Path, zeroise: bool) -> None:
    of = await SsdTier.open(config(tmp_path), NODE, [SMALL], zeroise=zeroise)
    placed = await put(of, SMALL, range(3))
    await of.erase([placed[1]])
    slot = peek(tmp_path, SMALL, placed[1])[HEADER_BYTES:]
    assert any(slot) != zeroise
    assert await right(of, SMALL, {n: placed[n] for n in (0, 2)}) == {0, 2}
    await of.close()


async def test_plain_files_are_overwritten_before_they_make_way_for_encrypted_ones(tmp_path: Path) -> None:
    plain = await tier(tmp_path)
    await put(plain, SMALL, range(3))
    await plain.close()
    links = tmp_path / "links"
    links.mkdir()
    for path in (tmp_path / NODE).glob("segment-*"):
        (links / path.name).hardlink_to(path)  # what somebody would find on the disk
    of = await SsdTier.open(config(tmp_path), NODE, [SMALL], keys=KEYS, zeroise=True)
    await of.close()
    assert not any(any(path.read_bytes()) for path in links.iterdir())
