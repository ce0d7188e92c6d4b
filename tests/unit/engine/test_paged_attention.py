"""Attention of single tokens over pages in place against a dense float64 reference. Whatever a row does not own is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Span
from moonpool.engine.paged_attention import DecodeRows
from moonpool.engine.paged_kernels import SPLIT

LAYERS = 2
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    kv_heads: int = 2
    share: int = 3
    dim: int = 64
    block: int = 64
    ends: tuple[int, ...] = (1,)  # tokens of each row, the one that asks included
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    border = st.sampled_from([SPLIT, 2 * SPLIT, 64, 512]).flatmap(lambda at: st.integers(at - 1, at + 2))
    return Case(
        kv_heads=draw(st.sampled_from([1, 2, 3, 5])),
        share=draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        dim=draw(st.sampled_from([16, 64, 80])),
        block=draw(st.sampled_from([16, 33, 64, 512])),
        ends=tuple(draw(st.lists(st.one_of(st.integers(1, 40), border, st.integers(1, 1100)), min_size=1, max_size=5))),
        window=draw(st.one_of(st.none(), st.integers(1, 600))),
        softcap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclass
class World:
    """Pages with K and V of every row in shuffled places, and NaN everywhere else."""

    case: Case
    layout: KVLayout = field(init=False)
    pages: torch.Tensor = field(init=False)
    spans: list[Span] = field(init=False)
    kept: list[torch.Tensor] = field(init=False)  # [layers, 2, kv_heads, tokens, dim] of each row
    query: torch.Tensor = field(init=False)  # [heads, tokens, dim]

    def __post_init__(self) -> None:
        case = self.case
        draw = torch.Generator().manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)
        self.layout = KVLayout("", LAYERS, case.kv_heads, case.dim, case.dtype, case.block)
        total = sum(blocks_for(end, case.block) for end in case.ends) + 3
        self.pages = torch.full((total, LAYERS, 2, case.kv_heads, case.block, case.dim), torch.nan, dtype=dtype)
        order = torch.randperm(total, generator=draw).numpy()
        self.spans, self.kept = [], []
        for i, end in enumerate(case.ends):
            table, order = order[: blocks_for(end, case.block)], order[blocks_for(end, case.block) :]
            kv = torch.randn((LAYERS, 2, case.kv_heads, end, case.dim), generator=draw).to(dtype)
            for at, page in enumerate(table):
                part = kv[:, :, :, at * case.block : (at + 1) * case.block]
                self.pages[int(page), :, :, :, : part.shape[3]] = part
            self.spans.append(Span(i, 1, end - 1, table))
            self.kept.append(kv)
        heads = case.kv_heads * case.share
        self.query = (2 * torch.randn((len(case.ends), heads, case.dim), generator=draw)).to(dtype).transpose(0, 1)

    def attend(self, layer: int, rows: list[int] | None = None) -> torch.Tensor:
        """[tokens, heads, dim]; tokens of other rows than ``rows`` are NaN."""
        spans = [self.spans[i] for i in rows] if rows is not None else self.spans
        case = self.case
        out = self.query.new_full((len(case.ends), self.query.shape[0], case.dim), torch.nan)
        nothing = self.query[:0]
        call = AttentionCall(self.query, nothing, nothing, case.dim**-0.5, case.window, case.softcap, True, ())
        DecodeRows(self.layout, self.pages, spans).attend(layer, call, out)
        return out

    def dense(self, layer: int, row: int) -> torch.Tensor:
        """float64 [heads, dim]."""
        case = self.case
        key, value = (
            self.kept[row][layer, side].double().repeat_interleave(case.share, 0)[:, -(case.window or 1 << 40) :]
            for side in (0, 1)
        )
        scores = torch.einsum("hd,htd->ht", self.query[:, row].double(), key) * case.dim**-0.5
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), value)


@given(cases())
@settings(max_examples=120, deadline=None)
@example(Case(ends=(SPLIT, SPLIT + 1, 1, 5 * SPLIT)))
@example(Case(ends=(700, 3), window=SPLIT))
def test_every_row_equals_dense_attention(case: Case) -> None:
    world = World(case)
    for layer in range(LAYERS):
        got = world.attend(layer)
        assert got.dtype is world.query.dtype
        for row in range(len(case.ends)):
            want = world.dense(layer, row)
            torch.testing.assert_close(got[row].double(), want, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@given(cases())
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_alone_and_in_company(case: Case) -> None:
    world = World(case)
    together = world.attend(1)
    for row in range(len(case.ends)):
        alone = world.attend(1, [row])
        assert torch.equal(alone[row], together[row])
        assert alone[torch.arange(len(case.ends)) != row].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_number_of_threads_nor_on_the_run(dtype: str) -> None:
    world = World(Case(kv_heads=3, ends=(3000, 1, 257, 1023, 64), dtype=dtype))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = world.attend(0)
        for threads in (2, 4, 3, 2):
            torch.set_num_threads(threads)
            for _ in range(25):
                assert torch.equal(world.attend(0), want)
    finally:
        torch.set_num_threads(before)


def test_one_set_of_rows_serves_layer_after_layer() -> None:
    """Counters of a former call are back at their beginning."""
    world = World(Case(ends=(900, 20, 300)))
    rows = DecodeRows(world.layout, world.pages, world.spans)
    nothing = world.query[:0]
    for layer in (0, 1, 0, 1):
        for window in (None, 500):
            out = torch.full((3, 6, 64), torch.nan)
            rows.attend(layer, AttentionCall(world.query, nothing, nothing, 0.125, window, None, True, ()), out)
            want = World(Case(ends=(900, 20, 300), window=window)).attend(layer)
            assert torch.equal(out, want)


def test_bad_numbers_of_a_row_are_seen_in_that_row_and_in_no_other() -> None:
    """A page read before it was filled must not pass for an answer."""
    for bad in (torch.nan, torch.inf):
        for side in (0, 1):
            world = World(Case(ends=(600, 600, 20)))
            world.pages[int(world.spans[0].table[7]), 0, side, 1, 3] = bad
            got = world.attend(0)
            assert not got[0, 3:].isfinite().any()
            assert got[0, :3].isfinite().all()
            assert got[1:].isfinite().all()


def test_huge_and_equal_scores_are_weighed_as_in_exact_arithmetic() -> None:
    world = World(Case(kv_heads=1, share=2, ends=(1000,)))
    world.query[0] *= 300  # one key takes all the weight
    world.query[1] = 0  # all keys have the same
    got = world.attend(0)[0].double()
    torch.testing.assert_close(got, world.dense(0, 0), atol=2e-5, rtol=2e-5)
