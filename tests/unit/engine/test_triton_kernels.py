"""The kernels of the Triton path, interpreted, against dense attention over random shapes. What nobody wrote is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_torch_backend import dense, fill

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import MLA, KVLayout
from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import CPU, PageTensor
from moonpool.engine.torch_backend import TorchStep
from moonpool.engine.triton.plans import StepPlan, page_tables
from moonpool.engine.triton.step import TritonStep
from moonpool.engine.triton.tiling import Tiling

LAYERS = 2
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
ONE_SPLIT = Tiling(wide=32, keys=32, split_keys=32, programs=1)
MANY_SPLITS = replace(ONE_SPLIT, keys=16, programs=8)


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
    row = st.tuples(st.integers(0, 80), st.one_of(st.just(1), st.integers(2, 20)))
    return Case(
        kv_heads=draw(st.sampled_from([1, 2])),
        share=draw(st.sampled_from([1, 2, 3, 7])),
        dim=draw(st.sampled_from([8, 16, 24, 80, 192])),
        block=draw(st.sampled_from([16, 33, 64, 512])),
        rows=tuple(draw(st.lists(row, min_size=1, max_size=2))),
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
        plan = StepPlan.of(self.spans, CPU, self.case.tiling)
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
@settings(max_examples=6, deadline=None)
@example(Case(rows=((0, 1), (40, 9)), share=20, window=1))
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


@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 5, 20])), min_size=1, max_size=2),
    heads=st.sampled_from([1, 4, 20]),
    rank=st.sampled_from([16, 24]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    tiling=st.sampled_from([ONE_SPLIT, MANY_SPLITS]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=4, deadline=None)
@example([(70, 1), (9, 20)], 4, 32, "float32", MANY_SPLITS, 1)
def test_latent_kernels_equal_the_torch_step(
    rows: list[tuple[int, int]], heads: int, rank: int, dtype: str, tiling: Tiling, seed: int
) -> None:
    draw, rope, size, kind = torch.Generator().manual_seed(seed), 8, 16, getattr(torch, dtype)
    total = sum(blocks_for(start + count, size) for start, count in rows) + 1
    ours, plain = (PageTensor(KVLayout("", LAYERS, 1, rank + rope, dtype, size, kind=MLA), total) for _ in range(2))
    ours.tensor[:] = torch.nan
    order, spans, first = torch.randperm(total, generator=draw).numpy(), [], 0
    for start, count in rows:
        table, order = order[: blocks_for(start + count, size)], order[blocks_for(start + count, size) :]
        before = torch.randn((LAYERS, start, rank + rope), generator=draw).to(kind)
        for t in range(start):
            ours.tensor[int(table[t // size]), :, t % size] = before[:, t]
            plain.tensor[int(table[t // size]), :, t % size] = before[:, t]
        spans.append(Span(first, count, start, table))
        first += count
    steps = (TritonStep(ours, StepPlan.of(spans, ours.device, tiling), None, None), TorchStep(plain, spans, None, None))
    for layer in range(LAYERS):
        asked = torch.randn((first, heads, rank + rope), generator=draw).to(kind).transpose(0, 1)
        latent = torch.randn((first, rank + rope), generator=draw).to(kind)
        got, want = (s.attend_latent(layer, LatentCall(asked[..., :rank], asked[..., rank:], latent, 0.3)) for s in steps)
        assert got.dtype is kind
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(ours.tensor.nan_to_num(0.0), plain.tensor)


def test_a_rank_reads_and_writes_its_own_heads_of_shared_pages_by_the_same_kernels() -> None:
    world = World(Case(kv_heads=3, share=2, rows=((40, 1), (3, 9))))
    whole, memory = world.memory, world.memory.tensor.clone()
    call, (first, last) = world.call(1), (1, 3)
    part = PageTensor(whole.layout, whole.pages, memory=memory.view(torch.uint8).view(-1), heads=range(first, last))
    queries = slice(first * 2, last * 2)
    own = replace(call, query=call.query[queries], key=call.key[first:last], value=call.value[first:last])
    got = TritonStep(part, StepPlan.of(world.spans, CPU, MANY_SPLITS), None, None).attend(1, own)
    want = world.step([]).attend(1, call)
    torch.testing.assert_close(got, want[:, queries], atol=1e-5, rtol=1e-5)
    assert torch.equal(part.own.nan_to_num(0.0), whole.tensor[:, :, :, first:last].nan_to_num(0.0))
    assert not memory[:, 1, :, 0].isnan().all() and not torch.equal(memory.nan_to_num(0.0), whole.tensor.nan_to_num(0.0))


def test_padding_writes_nothing_and_answers_zeros() -> None:
    """Rows of a captured step that nobody has: whatever lies in their buffers."""
    world = World(Case(rows=((20, 1), (50, 1))))
    plan, call = StepPlan.of_answers(4, 9, CPU, MANY_SPLITS), world.call(0)
    tables = page_tables(world.spans)
    plan.tables[:2, : tables.shape[1]] = torch.from_numpy(tables)
    plan.span_end[:2] = torch.tensor([21, 51])
    plan.positions[:2] = torch.tensor([20, 50])
    before = world.memory.tensor.clone()
    four = replace(call, **{name: torch.cat([getattr(call, name)] * 2, 1) for name in ("query", "key", "value")})
    got = TritonStep(world.memory, plan, None, None).attend(0, four)
    assert not got[2:].any()
    for row, (kv, span) in enumerate(zip(world.kept, world.spans, strict=True)):
        want = dense(world.query[:, row : row + 1], kv[0, 0], kv[0, 1], span.start, call)
        torch.testing.assert_close(got[row : row + 1].double(), want, atol=1e-5, rtol=1e-5)
        size = world.case.block
        before[int(span.table[span.start // size]), 0, :, :, span.start % size] = kv[0, :, :, span.start]
    torch.testing.assert_close(world.memory.tensor, before, equal_nan=True, atol=0, rtol=0)


def test_bad_numbers_of_a_row_are_seen_in_that_row_and_in_no_other() -> None:
    """A page read before it was filled must not pass for an answer."""
    world = World(Case(rows=((60, 1), (60, 1))))
    world.memory.tensor[int(world.spans[0].table[1]), 0, 0, 1, 3] = torch.nan
    got = world.step([]).attend(0, world.call(0))
    assert not got[0, 3:].isfinite().any()
    assert got[0, :3].isfinite().all() and got[1].isfinite().all()
