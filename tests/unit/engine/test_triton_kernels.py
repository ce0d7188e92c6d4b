"""The kernels of the Triton path, interpreted, against dense attention over random shapes. What nobody wrote is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_torch_backend import dense, fill

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.triton.plans import StepPlan
from moonpool.engine.triton.step import TritonStep
from moonpool.engine.triton.tiling import Tiling

LAYERS = 2
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
ONE_SPLIT = Tiling(wide=32, keys=16, split_keys=32, programs=1)
MANY_SPLITS = replace(ONE_SPLIT, programs=64)


@dataclass(frozen=True)
class Case:
    kv_heads: int = 2
    share: int = 3
    dim: int = 16
    block: int = 16
    rows: tuple[tuple[int, int], ...] = ((20, 1),)  # where each begins, and its tokens
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    tiling: Tiling = MANY_SPLITS
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    row = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(2, 40)))
    return Case(
        kv_heads=draw(st.sampled_from([1, 2])),
        share=draw(st.sampled_from([1, 2, 3, 7, 20])),
        dim=draw(st.sampled_from([8, 16, 24, 80])),
        block=draw(st.sampled_from([16, 33, 64])),
        rows=tuple(draw(st.lists(row, min_size=1, max_size=3))),
        window=draw(st.one_of(st.none(), st.integers(1, 90))),
        softcap=draw(st.sampled_from([None, 5.0])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        tiling=draw(st.sampled_from([ONE_SPLIT, MANY_SPLITS])),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclass
class World:
    """Pages that hold what comes before each row's tokens, in shuffled places; and what the step brings."""

    case: Case
    memory: PageTensor = field(init=False)
    spans: list[Span] = field(init=False)
    kept: list[torch.Tensor] = field(init=False)  # [layers, 2, kv_heads, tokens, dim] of each row
    query: torch.Tensor = field(init=False)  # [heads, tokens, dim]

    def __post_init__(self) -> None:
        case, draw = self.case, torch.Generator().manual_seed(self.case.seed)
        dtype = getattr(torch, case.dtype)
        total = sum(blocks_for(start + count, case.block) for start, count in case.rows) + 2
        self.memory = PageTensor(KVLayout("", LAYERS, case.kv_heads, case.dim, case.dtype, case.block), total)
        self.memory.tensor[:] = torch.nan
        order = torch.randperm(total, generator=draw).numpy()
        self.spans, self.kept, first = [], [], 0
        for start, count in case.rows:
            table, order = order[: blocks_for(start + count, case.block)], order[blocks_for(start + count, case.block) :]
            kv = torch.randn((LAYERS, 2, case.kv_heads, start + count, case.dim), generator=draw).to(dtype)
            fill(self.memory.tensor, table, kv[:, :, :, :start])
            self.spans.append(Span(first, count, start, table))
            self.kept.append(kv)
            first += count
        shape = (first, case.kv_heads * case.share, case.dim)
        self.query = (2 * torch.randn(shape, generator=draw)).to(dtype).transpose(0, 1)

    def call(self, layer: int) -> AttentionCall:
        case = self.case
        fresh = torch.cat([kv[layer, :, :, span.start :] for kv, span in zip(self.kept, self.spans, strict=True)], dim=2)
        return AttentionCall(self.query, fresh[0], fresh[1], case.dim**-0.5, case.window, case.softcap, True, ())

    def step(self, fired: list[str]) -> TritonStep:
        plan = StepPlan.of(self.spans, torch.device("cpu"), self.case.tiling)
        return TritonStep(
            self.memory, plan, lambda i: fired.append(f"before {i}"), lambda i: fired.append(f"on {i}, {self.holds(i)}")
        )

    def holds(self, layer: int) -> bool:
        """Whether K/V of all rows of ``layer`` are in pages."""
        size = self.case.block
        return all(
            torch.equal(self.memory.tensor[int(span.table[t // size]), layer, :, :, t % size], kv[layer, :, :, t])
            for kv, span in zip(self.kept, self.spans, strict=True)
            for t in range(span.end)
        )


@given(cases())
@settings(max_examples=25, deadline=None)
@example(Case(rows=((0, 1), (40, 33)), share=20, window=1))
@example(Case(rows=((149, 1), (16, 16)), dtype="bfloat16", block=33, dim=24))
def test_kernels_of_a_mixed_step_equal_dense_attention_and_write_their_pages_only(case: Case) -> None:
    world = World(case)
    before, fired = world.memory.tensor.clone(), []  # type: tuple[torch.Tensor, list[str]]
    step = world.step(fired)
    for layer in range(LAYERS):
        call = world.call(layer)
        got = step.attend(layer, call)
        assert got.dtype is world.query.dtype
        for kv, span in zip(world.kept, world.spans, strict=True):
            here = slice(span.first, span.first + span.count)
            want = dense(world.query[:, here], kv[layer, 0], kv[layer, 1], span.start, call)
            limit = TOLERANCE[case.dtype]
            torch.testing.assert_close(got[here].double(), want, atol=limit, rtol=limit)
    assert fired == ["before 0", "on 0, True", "before 1", "on 1, True"]
    for kv, span in zip(world.kept, world.spans, strict=True):
        fill(before, span.table, kv)
    torch.testing.assert_close(world.memory.tensor, before, equal_nan=True, atol=0, rtol=0)
