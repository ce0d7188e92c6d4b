"""Files of the SSD tier and objects of the shared one gone wrong: a block comes back right or not at all."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import fuzzing, mutated, stands
from support.ssd import NODE, SMALL, config, key, put, right, tier, writes

from moonpool.core.use import Use
from moonpool.kvstore.sealing.keys import KvKey, KvKeys
from moonpool.kvstore.sealing.stream import TAG_BYTES
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.shared_tier.form import copy_of, seal, slot_in
from moonpool.kvstore.ssd.format import (
    HEADER_BYTES,
    ExtentHeader,
    SegmentHeader,
    decode_body,
    decode_extent,
    decode_segment,
    encode_body,
    encode_extent,
    encode_segment,
    extent_bytes,
)
from moonpool.kvstore.ssd.tier import SsdTier

KEYS = KvKeys(KvKey.of(bytes(range(32))))
HEADER = ExtentHeader(1, 2, 3, 4, SMALL.fingerprint, key(1), key(2), Use("tenant", "chat", 1, 2), (5, 6))
VAULT = Vault(KEYS)
PAGES = (
    encode_extent(HEADER),
    encode_segment(SegmentHeader(1, 1 << 20, 2, 3, SMALL)),
    encode_segment(SegmentHeader(1, 1 << 20, 2, 3, None, sealed=True)),
    VAULT.seal(HEADER, np.zeros(64, np.uint8), np.zeros(64 + TAG_BYTES, np.uint8)),
)
both_kinds = pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "sealed"])


@fuzzing(60)
@given(mutated(*PAGES), st.booleans())
def test_header_pages(data: bytes, resealed: bool) -> None:
    """``resealed``: with a digest that is right, as whoever writes the files could make it."""
    import xxhash

    if resealed:
        body = data[: HEADER_BYTES - 16].ljust(HEADER_BYTES - 16, b"\0")
        data = body + xxhash.xxh3_128_intdigest(body).to_bytes(16, "little")
    for decode in (decode_extent, decode_segment, VAULT.open_header):
        stands(partial(decode, data))  # type: ignore[arg-type]


@fuzzing(50)
@given(mutated(encode_body(HEADER)))
def test_bodies_that_a_member_might_have_sealed(data: bytes) -> None:
    stands(lambda: decode_body(data.ljust(4020, b"\0")[:4020]))


@both_kinds
def test_objects(keys: KvKeys | None) -> None:
    (block,) = writes(SMALL, [1])
    vault = None if keys is None else Vault(keys)
    made = seal(copy_of(block), block, vault)
    assert made is not None
    whole = made.tobytes()

    @fuzzing(60)
    @given(mutated(whole))
    def run(data: bytes) -> None:
        found = stands(lambda: slot_in(np.frombuffer(data, np.uint8).copy(), SMALL, block.key, vault))
        end = SMALL.block_bytes
        assert found is None or bytes(found[:end]) == bytes(block.data[:end])  # type: ignore[index]

    run()


@both_kinds
def test_segment_files(tmp_path: Path, keys: KvKeys | None) -> None:
    """Several places of a file changed behind the tier's back, then a start: it opens, and what it finds is right or torn."""

    async def written() -> dict[int, int]:
        of = await tier(tmp_path, keys=keys)
        placed = await put(of, SMALL, range(12), chain=True)
        await of.close()
        return placed

    placed = asyncio.run(written())
    files = sorted((tmp_path / NODE).glob("segment-*"))
    before = [path.read_bytes() for path in files]
    reach = HEADER_BYTES + 12 * extent_bytes(SMALL)

    @fuzzing(6)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        for path, raw in zip(files, before, strict=True):
            path.write_bytes(raw)
        for _ in range(data.draw(st.integers(1, 4))):
            path = data.draw(st.sampled_from(files))
            at = data.draw(st.integers(0, reach - 64))
            raw = path.read_bytes()
            changed = data.draw(mutated(raw[at : at + 64]))[:4096]
            shift = data.draw(st.booleans())  # what follows moves, too
            path.write_bytes(raw[:at] + changed + raw[at + (64 if shift else len(changed)) :])

        async def read_again() -> None:
            of = await SsdTier.open(config(tmp_path), NODE, [SMALL], keys=keys)
            try:
                found = {block.key: block.extent for block in of.recovered}
                await right(of, SMALL, {n: found[key(n)] for n in placed if key(n) in found})
            finally:
                await of.close()

        asyncio.run(read_again())
        for path in (tmp_path / NODE).glob("segment-*"):
            path.unlink()

    run()
