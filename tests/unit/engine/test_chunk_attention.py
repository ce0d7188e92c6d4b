"""Attention of prompts in blocks of queries and groups of keys against dense attention; what nobody wrote is NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_torch_backend import dense, fill

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Span
from moonpool.engine.chunk_attention import ChunkRow
from moonpool.engine.page_tensor import PageTensor

SIZE = 4


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 30),
    share=st.sampled_from([1, 3]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 5.0]),
    query_block=st.sampled_from([1, 5, 8, 64]),
    pages_at_once=st.sampled_from([1, 2, 7, 1000]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_any_blocks_and_groups_equal_dense_attention(
    start: int,
    count: int,
    share: int,
    window: int | None,
    softcap: float | None,
    query_block: int,
    pages_at_once: int,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    layout = KVLayout("", 2, 2, 8, "float32", SIZE)
    n = blocks_for(start + count, SIZE)
    memory = PageTensor(layout, n + 2)
    memory.tensor[:] = torch.nan
    table = torch.randperm(n + 2, generator=draw).numpy()[:n].copy()
    kv = torch.randn((2, 2, 2, start + count, 8), generator=draw)
    fill(memory.tensor, table, kv)
    query = torch.randn((2 * share, 3 + count, 8), generator=draw)  # behind three tokens of other rows
    score_bytes = pages_at_once * SIZE * 2 * share * min(query_block, count) * 4
    row = ChunkRow(memory, Span(3, count, start, table), query_block=query_block, score_bytes=score_bytes)
    for layer in (0, 1):
        call = AttentionCall(query, kv[layer, 0], kv[layer, 1], 0.4, window, softcap, True, ())
        out = torch.full((3 + count, 2 * share, 8), 7.0)
        row.attend(layer, call, out)
        want = dense(query[:, 3:], kv[layer, 0], kv[layer, 1], start, call)
        torch.testing.assert_close(out[3:].double(), want, atol=2e-5, rtol=2e-5)
        assert (out[:3] == 7.0).all()


@pytest.mark.parametrize("pages_at_once", [1, 2, 7])
@pytest.mark.parametrize("query_block", [1, 5, 64])
def test_latents_in_groups_are_merged_as_wide_as_values_are(pages_at_once: int, query_block: int) -> None:
    """Rows of 8 numbers, of which the first 5 are values, too."""
    draw = torch.Generator().manual_seed(query_block)
    memory = PageTensor(KVLayout("", 1, 1, 8, "float32", SIZE, kind="mla"), 10)
    memory.tensor[:] = torch.nan
    table = torch.randperm(10, generator=draw).numpy()[:9].copy()
    latents, query = torch.randn((34, 8), generator=draw), torch.randn((3, 21, 8), generator=draw)
    for t in range(34):
        memory.tensor[int(table[t // SIZE]), 0, t % SIZE] = latents[t]
    call = AttentionCall(query, latents[None, 13:], latents[None, 13:], 0.4, None, None, True, ())
    out = torch.empty((21, 3, 5))
    score_bytes = pages_at_once * SIZE * 3 * min(query_block, 21) * 4
    ChunkRow(memory, Span(0, 21, 13, table), query_block=query_block, score_bytes=score_bytes).attend(0, call, out)
    want = dense(query, latents[None], latents[None, :, :5], 13, call)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pages_at_once", [2, 1000])
def test_bfloat16_stays_near_dense_attention_in_any_groups(pages_at_once: int) -> None:
    draw = torch.Generator().manual_seed(0)
    layout = KVLayout("", 1, 3, 64, "bfloat16", 64)
    memory = PageTensor(layout, 8)
    memory.tensor[:] = torch.nan
    table = np.array([5, 2, 7, 0, 1])
    kv = torch.randn((1, 2, 3, 300, 64), generator=draw).bfloat16()
    fill(memory.tensor, table, kv)
    query = torch.randn((9, 200, 64), generator=draw).bfloat16()
    call = AttentionCall(query, kv[0, 0, :, 100:], kv[0, 1, :, 100:], 0.125, None, None, True, ())
    out = query.new_empty((200, 9, 64))
    ChunkRow(memory, Span(0, 200, 100, table), score_bytes=pages_at_once * 64 * 9 * 128 * 2).attend(0, call, out)
    torch.testing.assert_close(out.double(), dense(query, kv[0, 0], kv[0, 1], 100, call), atol=2e-2, rtol=2e-2)


def test_a_long_prefix_is_never_gathered_as_a_whole() -> None:
    """K and V of one group stay within what its scores may take."""
    layout = KVLayout("", 1, 8, 128, "bfloat16", 64)
    memory = PageTensor(layout, 1)
    span = Span(0, 512, 130_000, np.zeros(blocks_for(130_512, 64), dtype=np.int64))
    query = torch.empty((32, 512, 128), dtype=torch.bfloat16)
    call = AttentionCall(query, query[:8], query[:8], 0.1, None, None, True, ())
    groups = ChunkRow(memory, span)._plan(call)
    assert groups[0].low == 0
    assert groups[-1].high == span.end
    assert all(a.high == b.low for a, b in itertools.pairwise(groups))
    assert max(len(group.index) * 64 * 128 * 2 for group in groups) <= 16 << 20
