from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.digests import slice_digest, slice_seed
from moonpool.core.errors import ConfigError, LayoutMismatch
from moonpool.core.layout import DIGEST_BYTES, ITEM_BYTES, SLOT_ALIGN, KVLayout

dims, dtypes, tokens = st.integers(1, 8), st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 24)
plain = st.builds(KVLayout, st.just("m"), st.integers(1, 5), st.integers(1, 4), dims, dtypes, tokens)
latents = st.builds(KVLayout, st.just("m"), st.integers(1, 5), st.just(1), dims, dtypes, tokens, kind=st.just("mla"))
layouts = plain | latents


def element_numbers(layout: KVLayout) -> np.ndarray:
    """One layer slice, [plane, token, dim, byte], every byte of it numbered modulo 251."""
    planes = 2 * layout.kv_heads if layout.kind == "kv" else 1
    shape = (planes, layout.block_tokens, layout.head_dim, ITEM_BYTES[layout.dtype])
    return (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)


@given(layouts)
def test_sizes_add_up(layout: KVLayout) -> None:
    assert layout.slice_bytes == element_numbers(layout).nbytes
    assert layout.block_bytes == layout.layers * layout.slice_bytes
    assert layout.token_bytes * layout.block_tokens == layout.block_bytes
    assert layout.slot_bytes % SLOT_ALIGN == 0
    assert 0 <= layout.slot_bytes - layout.block_bytes - DIGEST_BYTES * layout.layers < SLOT_ALIGN


@given(layouts, st.data())
def test_pieces_are_exactly_the_first_tokens_of_every_plane(layout: KVLayout, data: st.DataObject) -> None:
    valid = data.draw(st.integers(1, layout.block_tokens))
    numbers = element_numbers(layout)
    raw = numbers.reshape(-1)
    gathered = np.concatenate([raw[offset : offset + length] for offset, length in layout.pieces(valid)])
    assert np.array_equal(gathered, numbers[:, :valid].reshape(-1))
    assert len(layout.pieces(valid)) == (1 if valid == layout.block_tokens else len(numbers))


@given(layouts, st.binary(min_size=16, max_size=16), st.integers(0, 200), st.data())
def test_digests_cover_valid_bytes_in_slice_order_and_nothing_else(
    layout: KVLayout, key: bytes, layer: int, data: st.DataObject
) -> None:
    valid = data.draw(st.integers(1, layout.block_tokens))
    numbers = element_numbers(layout)
    digest = slice_digest(layout, numbers.reshape(-1), key, layer, valid)
    seed = xxhash.xxh3_64_intdigest(key + layer.to_bytes(4, "little"))
    assert digest == xxhash.xxh3_64_intdigest(numbers[:, :valid].tobytes(), seed)
    numbers[:, valid:] = 255
    assert slice_digest(layout, numbers.reshape(-1), key, layer, valid) == digest
    at = data.draw(st.integers(0, numbers[:, :valid].size - 1))
    where = np.unravel_index(at, numbers[:, :valid].shape)
    numbers[where] ^= 1 << data.draw(st.integers(0, 7))
    assert slice_digest(layout, numbers.reshape(-1), key, layer, valid) != digest


def test_right_bytes_under_another_key_or_layer_have_another_digest() -> None:
    layout = KVLayout("m", 2, 1, 8, "float32", block_tokens=16)
    raw = element_numbers(layout).reshape(-1)
    places = [(key, layer) for key in (b"a" * 16, b"b" * 16) for layer in (0, 1)]
    assert len({slice_seed(*place) for place in places}) == 4
    assert len({slice_digest(layout, raw, *place, 16) for place in places}) == 4


def test_the_fingerprint_covers_every_field() -> None:
    layout = KVLayout("m", 2, 1, 8, "float32")
    changed = {"model": "n", "layers": 3, "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "block_tokens": 32}
    changed |= {"order": "dot_product", "digest": "other", "codec": "int8", "kind": "mla"}
    assert set(changed) == {f.name for f in dataclasses.fields(KVLayout)}
    prints = {dataclasses.replace(layout, **{name: value}).fingerprint for name, value in changed.items()}
    assert len(prints | {layout.fingerprint}) == len(changed) + 1
    assert dataclasses.replace(layout).fingerprint == layout.fingerprint


def test_the_fingerprint_of_a_layout_of_keys_and_values_is_what_it_was_before_there_were_kinds() -> None:
    """It names folders and blocks that lie on disks."""
    assert KVLayout("ab" * 16, 30, 3, 64, "bfloat16").fingerprint == "5140d610afc771793456595ea7066885"


def test_a_token_of_a_large_model_with_latents_takes_as_much_as_its_authors_say() -> None:
    assert KVLayout("m", 61, 1, 512 + 64, "bfloat16", kind="mla").token_bytes == 70_272


def test_a_mismatch_names_every_differing_field_with_both_values() -> None:
    mine = KVLayout("m", 2, 1, 8, "float32")
    mine.require_same(dataclasses.replace(mine), "store-b")
    with pytest.raises(LayoutMismatch) as caught:
        mine.require_same(dataclasses.replace(mine, dtype="bfloat16", block_tokens=32), "store-b")
    message = caught.value.message
    assert "dtype 'float32' here, 'bfloat16' at store-b" in message
    assert "block_tokens 64 here, 32 at store-b" in message
    assert "layers" not in message


@pytest.mark.parametrize(("field", "value"), [("block_tokens", 0), ("block_tokens", 513), ("dtype", "int4"), ("kind", "")])
def test_impossible_layouts_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        dataclasses.replace(KVLayout("m", 2, 1, 8, "float32"), **{field: value})
    assert caught.value.param == field


def test_latents_of_several_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_heads: 2 of kind mla"):
        KVLayout("m", 2, 2, 8, "float32", kind="mla")
