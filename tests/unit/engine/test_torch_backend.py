"""Paged attention against dense attention, over random shapes. Every byte that no sequence wrote is NaN."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.torch_backend import TorchStep

LAYERS = 2


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[int, int]], int | None, float | None, int]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    share = draw(st.sampled_from([1, 2, 7]))
    dim = draw(st.sampled_from([8, 16, 24, 80]))
    block = draw(st.sampled_from([4, 16]))
    row = st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40)))
    rows = draw(st.lists(row, min_size=1, max_size=6))
    window = draw(st.one_of(st.none(), st.integers(1, 60)))
    softcap = draw(st.sampled_from([None, None, 5.0]))
    return kv_heads, share, dim, block, rows, window, softcap, draw(st.integers(0, 2**31))


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, call: AttentionCall) -> torch.Tensor:
    """[count, heads, dim] in float64; key and value are of the whole sequence."""
    share = query.shape[0] // key.shape[0]
    key, value = (t.double().repeat_interleave(share, 0) for t in (key, value))
    scores = query.double() @ key.transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    at, keys = torch.arange(start, start + query.shape[1])[:, None], torch.arange(key.shape[1])
    seen = keys <= at
    if call.window is not None:
        seen &= keys > at - call.window
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ value).transpose(0, 1)


@given(steps())
@settings(max_examples=200, deadline=None)
def test_a_mixed_step_equals_dense_attention_and_writes_its_pages_only(
    step: tuple[int, int, int, int, list[tuple[int, int]], int | None, float | None, int],
) -> None:
    kv_heads, share, dim, block, rows, window, softcap, seed = step
    draw = torch.Generator().manual_seed(seed)
    layout = KVLayout("", LAYERS, kv_heads, dim, "float32", block)
    pages = sum(blocks_for(start + count, block) for start, count in rows) + 2
    memory = PageTensor(layout, pages)
    memory.tensor[:pages] = torch.nan
    order = torch.randperm(pages, generator=draw).numpy()
    spans, sequences, first = [], [], 0
    for start, count in rows:
        n = blocks_for(start + count, block)
        table, order = np.sort(order[:n])[::-1].copy(), order[n:]
        kv = torch.randn((LAYERS, 2, kv_heads, start + count, dim), generator=draw)
        fill(memory.tensor, table, kv[:, :, :, :start])
        spans.append(Span(first, count, start, table))
        sequences.append(kv)
        first += count
    before = memory.tensor.clone()
    fired: list[str] = []
    under_test = TorchStep(memory, spans, lambda i: fired.append(f"before {i}"), lambda i: fired.append(f"on {i}"))
    for layer in range(LAYERS):
        fresh = torch.cat([kv[layer, :, :, span.start :] for kv, span in zip(sequences, spans, strict=True)], dim=2)
        query = torch.randn((kv_heads * share, first, dim), generator=draw)
        call = AttentionCall(query, fresh[0], fresh[1], dim**-0.5, window, softcap, True, ())
        got = under_test.attend(layer, call)
        for kv, span in zip(sequences, spans, strict=True):
            here = slice(span.first, span.first + span.count)
            want = dense(query[:, here], kv[layer, 0], kv[layer, 1], span.start, call)
            torch.testing.assert_close(got[here].double(), want, atol=2e-5, rtol=2e-5)
    assert fired == ["before 0", "on 0", "before 1", "on 1"]
    for kv, span in zip(sequences, spans, strict=True):
        fill(before, span.table, kv)
    torch.testing.assert_close(memory.tensor, before, equal_nan=True, atol=0, rtol=0)


def fill(pages: torch.Tensor, table: np.ndarray, kv: torch.Tensor) -> None:
    """Write [layers, 2, kv_heads, tokens, dim] token by token."""
    size = pages.shape[4]
    for t in range(kv.shape[3]):
        pages[int(table[t // size]), :, :, :, t % size] = kv[:, :, :, t]


def test_bfloat16_stays_near_dense_attention() -> None:
    draw = torch.Generator().manual_seed(0)
    layout = KVLayout("", 1, 3, 64, "bfloat16", 64)
    memory = PageTensor(layout, 8)
    memory.tensor[:8] = torch.nan
    table = np.array([5, 2, 7, 0])
    kv = torch.randn((1, 2, 3, 200, 64), generator=draw).bfloat16()
    fill(memory.tensor, table, kv[:, :, :, :136])
    query = torch.randn((9, 64, 64), generator=draw).bfloat16()
    call = AttentionCall(query, kv[0, 0, :, 136:], kv[0, 1, :, 136:], 0.125, None, None, True, ())
    got = TorchStep(memory, [Span(0, 64, 136, table)], None, None).attend(0, call)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), dense(query, kv[0, 0], kv[0, 1], 136, call), atol=2e-2, rtol=2e-2)


@given(steps(), st.sampled_from([8, 24, 40]))
@settings(max_examples=80, deadline=None)
def test_a_mixed_step_over_latents_equals_dense_attention_and_writes_its_pages_only(
    step: tuple[int, int, int, int, list[tuple[int, int]], int | None, float | None, int], rank: int
) -> None:
    """As dense attention of all heads to one, whose values are the first ``rank`` columns of its keys."""
    _, heads, rope, block, rows, _, _, seed = step
    draw = torch.Generator().manual_seed(seed)
    layout = KVLayout("", LAYERS, 1, rank + rope, "float32", block, kind="mla")
    pages = sum(blocks_for(start + count, block) for start, count in rows) + 2
    memory = PageTensor(layout, pages)
    memory.tensor[:] = torch.nan
    order = torch.randperm(pages, generator=draw).numpy()
    spans, sequences, first = [], [], 0
    for start, count in rows:
        n = blocks_for(start + count, block)
        table, order = order[:n].copy(), order[n:]
        latents = torch.randn((LAYERS, start + count, rank + rope), generator=draw)
        _fill_latents(memory.tensor, table, latents[:, :start])
        spans.append(Span(first, count, start, table))
        sequences.append(latents)
        first += count
    before = memory.tensor.clone()
    under_test = TorchStep(memory, spans, None, None)
    for layer in range(LAYERS):
        fresh = torch.cat([one[layer, span.start :] for one, span in zip(sequences, spans, strict=True)])
        query = torch.randn((heads, first, rank + rope), generator=draw)
        call = LatentCall(query[..., :rank], query[..., rank:], fresh, 0.3)
        plain = AttentionCall(query, fresh[None], fresh[None], 0.3, None, None, True, ())
        got = under_test.attend_latent(layer, call)
        assert got.shape == (first, heads, rank)
        for one, span in zip(sequences, spans, strict=True):
            here, keys = slice(span.first, span.first + span.count), one[layer][None]
            want = dense(query[:, here], keys, keys[..., :rank], span.start, plain)
            torch.testing.assert_close(got[here].double(), want, atol=2e-5, rtol=2e-5)
    for one, span in zip(sequences, spans, strict=True):
        _fill_latents(before, span.table, one)
    torch.testing.assert_close(memory.tensor, before, equal_nan=True, atol=0, rtol=0)


def _fill_latents(pages: torch.Tensor, table: np.ndarray, rows: torch.Tensor) -> None:
    """Write [layers, tokens, width] token by token."""
    size = pages.shape[2]
    for t in range(rows.shape[1]):
        pages[int(table[t // size]), :, t % size] = rows[:, t]
