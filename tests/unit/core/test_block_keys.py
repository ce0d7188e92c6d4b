from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.blocks import HASH_KEY_BYTES, KEY_BYTES, BlockHasher, blocks_for, chunk_end, key_id, load_hash_key, namespace
from moonpool.core.errors import ConfigError
from moonpool.core.layout import KVLayout

HASH_KEY = bytes(range(32))
SPACE = b"namespace of 16b"
LAYOUT = KVLayout("m", 2, 1, 8, "float32")
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def dumb_keys(ids: list[int], size: int) -> list[bytes]:
    out, parent = [], bytes(16)
    for first in range(0, len(ids) - size + 1, size):
        block = b"".join(token.to_bytes(4, "little") for token in ids[first : first + size])
        parent = hashlib.blake2b(SPACE + parent + block, digest_size=16, key=HASH_KEY).digest()
        out.append(parent)
    return out


@given(tokens, st.integers(1, 9))
def test_keys_are_the_chained_digests_of_whole_blocks(ids: list[int], size: int) -> None:
    keys = BlockHasher(HASH_KEY, SPACE, size).keys(ids)
    assert keys == dumb_keys(ids, size)
    assert all(len(key) == KEY_BYTES for key in keys)


@given(tokens, st.integers(1, 9), st.integers(0, 40))
def test_known_leading_keys_change_nothing(ids: list[int], size: int, known: int) -> None:
    hasher = BlockHasher(HASH_KEY, SPACE, size)
    whole = hasher.keys(ids)
    assert hasher.keys(ids, known=whole[:known]) == whole


@given(tokens.filter(bool), st.integers(1, 9), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(ids: list[int], size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    hasher = BlockHasher(HASH_KEY, SPACE, size)
    same = [a == b for a, b in zip(hasher.keys(ids), hasher.keys(other), strict=True)]
    assert same == [i < at // size for i in range(len(same))]


def test_namespaces_and_hash_keys_keep_blocks_apart() -> None:
    ids = list(range(16))
    spaces = {
        namespace(LAYOUT),
        namespace(replace(LAYOUT, model="other")),
        namespace(replace(LAYOUT, dtype="bfloat16")),
        namespace(LAYOUT, adapter="lora"),
        namespace(LAYOUT, tenant_salt=b"lora"),
        namespace(LAYOUT, adapter="lo", tenant_salt=b"ra"),
    }
    assert len(spaces) == 6
    keys = {BlockHasher(key, space, 16).keys(ids)[0] for space in spaces for key in (HASH_KEY, bytes(32))}
    assert len(keys) == 12


def test_tokens_beyond_the_last_whole_block_have_no_key() -> None:
    hasher = BlockHasher(HASH_KEY, SPACE, 64)
    assert hasher.keys([]) == []
    assert hasher.keys(range(63)) == []
    assert hasher.keys(range(127)) == hasher.keys(range(64))


def test_the_id_of_a_hash_key_tells_keys_apart_without_telling_them() -> None:
    assert key_id(HASH_KEY) == key_id(HASH_KEY)
    assert key_id(HASH_KEY) != key_id(bytes(32))
    assert HASH_KEY.hex()[:8] not in key_id(HASH_KEY)


def test_the_first_start_makes_a_private_key_and_later_ones_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "hash.key"
    key = load_hash_key(path)
    assert len(key) == HASH_KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_hash_key(path) == key
    assert os.listdir(path.parent) == ["hash.key"]


def test_processes_that_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_hash_key(tmp_path / "hash.key"), range(64)))
    assert len(keys) == 1
    assert os.listdir(tmp_path) == ["hash.key"]


def test_a_damaged_or_unusable_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"holds 1 bytes, 32 needed"):
        load_hash_key(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"key_file: cannot read or make") as caught:
        load_hash_key(tmp_path / "short" / "below")
    assert caught.value.param == "key_file"


@given(st.integers(0, 5_000), st.integers(1, 512))
def test_blocks_for_counts_a_partly_filled_last_block(count: int, size: int) -> None:
    assert blocks_for(count, size) == len(range(0, count, size))


def dumb_chunk_end(start: int, total: int, budget: int, block: int) -> int:
    """Add tokens one by one: the last end within budget that is a border or the total, else the next such end."""
    ends = [end for end in range(start + 1, total + 1) if end % block == 0 or end == total]
    within = [end for end in ends if end - start <= budget]
    if within:
        return within[-1]
    return ends[0] if ends else total


@given(st.data())
def test_chunks_end_where_counting_one_by_one_ends_them(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 300))
    start = data.draw(st.integers(0, total))
    budget, block = data.draw(st.integers(-2, 400)), data.draw(st.integers(1, 70))
    assert chunk_end(start, total, budget, block) == dumb_chunk_end(start, total, budget, block)


@given(st.integers(1, 400), st.integers(0, 100), st.integers(1, 70))
def test_chunks_cover_a_prompt_and_split_no_block(total: int, budget: int, block: int) -> None:
    at, ends = 0, []
    while at < total:
        at = chunk_end(at, total, budget, block)
        ends.append(at)
    assert ends[-1] == total
    assert all(end % block == 0 for end in ends[:-1])
    assert ends == sorted(set(ends))


def test_reading_an_existing_key_writes_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    key = load_hash_key(folder / "hash.key")
    before = folder.stat().st_mtime_ns
    assert load_hash_key(folder / "hash.key") == key
    assert folder.stat().st_mtime_ns == before
