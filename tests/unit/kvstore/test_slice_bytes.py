"""Slices in slots, of keys and values and of latents: what is copied, checked and zeroed, against plain indexing."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from moonpool.core.digests import slice_digest
from moonpool.core.errors import DigestMismatch
from moonpool.core.layout import KVLayout
from moonpool.kvstore import slices

shape = {"layers": st.integers(1, 3), "head_dim": st.integers(1, 6), "dtype": st.sampled_from(["float32", "bfloat16"])}
layouts = st.one_of(
    st.builds(KVLayout, st.just("m"), kv_heads=st.integers(1, 3), block_tokens=st.integers(1, 9), **shape),
    st.builds(KVLayout, st.just("m"), kv_heads=st.just(1), block_tokens=st.integers(1, 9), kind=st.just("mla"), **shape),
)


@given(layouts, st.data())
@settings(max_examples=80, deadline=None)
def test_what_lies_past_the_valid_tokens_is_neither_checked_nor_read(layout: KVLayout, data: st.DataObject) -> None:
    valid = data.draw(st.integers(1, layout.block_tokens))
    layer, key, offset = data.draw(st.integers(0, layout.layers - 1)), b"k" * 16, layout.slot_bytes
    region = np.random.default_rng(valid).integers(1, 255, 3 * layout.slot_bytes, dtype=np.uint8)
    before = region.copy()
    fresh = slices.slice_of(layout, region, offset, layer).copy()
    planes = 1 if layout.kind == "mla" else 2 * layout.kv_heads
    want = fresh.reshape(planes, layout.block_tokens, -1).copy()
    want[:, valid:] = 0
    digest = slice_digest(layout, fresh, key, layer, valid)
    rest = slices.slice_of(layout, region, offset, layer).reshape(planes, layout.block_tokens, -1)[:, valid:]
    rest[:] = 255  # of a sender that is still writing
    assert slices.is_right(layout, region, offset, layer, key, valid, digest)
    slices.trailer_of(layout, region, offset)[layer] = digest
    into = np.empty(layout.slice_bytes, np.uint8)
    slices.read(layout, region, offset, layer, key, valid, into)
    assert np.array_equal(into, want.reshape(-1))
    slices.mark(layout, region, offset, layer, valid, digest)
    at = offset + layer * layout.slice_bytes
    before[at : at + layout.slice_bytes] = want.reshape(-1)
    trailer = offset + layout.block_bytes + 8 * layer
    before[trailer : trailer + 8] = np.frombuffer(digest.to_bytes(8, "little"), np.uint8)
    assert np.array_equal(region, before), "nothing else was touched"
    slices.slice_of(layout, region, offset, layer)[0] ^= 1
    with pytest.raises(DigestMismatch):
        slices.read(layout, region, offset, layer, key, valid, into)
