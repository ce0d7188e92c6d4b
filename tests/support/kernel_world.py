"""Rows of a step: the same K/V in pages of any device and dtype, and in float32 in pages of the host, as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import MLA, KVLayout
from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import CPU, PageTensor
from moonpool.engine.quantised import Kept, dequantise, quantise
from moonpool.engine.torch_backend import TorchStep
from moonpool.engine.triton.plans import StepPlan
from moonpool.engine.triton.step import TritonStep

LAYERS = 2


@dataclass
class World:
    """``rows``: where each begins, and its tokens. K/V before them are in pages already, in shuffled places."""

    rows: Sequence[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 64
    dtype: str = "bfloat16"
    kept: Kept = "auto"
    latent: bool = False
    window: int | None = None
    softcap: float | None = None
    device: torch.device = CPU
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(3)
        pages = sum(blocks_for(start + count, self.block) for start, count in self.rows)
        order, first = draw.permutation(pages), 0
        for start, count in self.rows:
            n = blocks_for(start + count, self.block)
            table, order = order[:n], order[n:]
            self.spans.append(Span(first, count, start, table))
            first += count
        kind = {"kind": MLA} if self.latent else {}
        heads = 1 if self.latent else self.kv_heads
        self.layout, exact = (
            KVLayout("world", LAYERS, heads, self.dim, dtype, self.block, **kind)  # type: ignore[arg-type]
            for dtype in (self.dtype, "float32")
        )
        self.memory = PageTensor(self.layout, pages, device=self.device, kept=self.kept)
        self.exact = PageTensor(exact, pages)
        torch.manual_seed(5)
        before = torch.randn(self.exact.tensor.shape).to(getattr(torch, self.dtype))
        if self.memory.exponents is None:
            self.memory.tensor.copy_(before)
            self.exact.tensor.copy_(before)
        else:
            values, exponents = quantise(before, self.kept)
            self.memory.tensor.copy_(values)
            self.memory.exponents.copy_(exponents)
            self.exact.tensor.copy_(dequantise(values, exponents))

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)

    def call(self) -> AttentionCall:
        query, key, value = (
            torch.randn((heads, self.tokens, self.dim)).to(getattr(torch, self.dtype))
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return AttentionCall(query, key, value, self.dim**-0.5, self.window, self.softcap, True, ())

    def latent_call(self, rank: int) -> LatentCall:
        dtype = getattr(torch, self.dtype)
        return LatentCall(
            query_latent=torch.randn((self.heads, self.tokens, rank)).to(dtype),
            query_rope=torch.randn((self.heads, self.tokens, self.dim - rank)).to(dtype),
            latent=torch.randn((self.tokens, self.dim)).to(dtype),
            scaling=self.dim**-0.5,
        )

    def holds_what_was_written(self) -> bool:
        """The same values in every row of both, so none was written that should not be."""
        held = self.memory.tensor.cpu()
        if self.memory.exponents is not None:
            held = dequantise(held, self.memory.exponents.cpu())
        return torch.equal(held.float(), self.exact.tensor)

    def step(self, call: AttentionCall | LatentCall, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, heads, columns] in float32: of the kernels, and of the reference over the same K/V."""
        ours = TritonStep(self.memory, StepPlan.of(self.spans, self.device), None, None)
        reference = TorchStep(self.exact, self.spans, None, None)
        there, exact = _moved(call, self.device, None), _moved(self._as_kept(call), CPU, torch.float32)
        if isinstance(there, AttentionCall):
            assert isinstance(exact, AttentionCall)
            return ours.attend(layer, there).float().cpu(), reference.attend(layer, exact)
        assert isinstance(exact, LatentCall)
        return ours.attend_latent(layer, there).float().cpu(), reference.attend_latent(layer, exact)

    def _as_kept(self, call: AttentionCall | LatentCall) -> AttentionCall | LatentCall:
        """Fresh K/V as the pages will hold them."""
        if self.kept == "auto":
            return call
        if isinstance(call, LatentCall):
            return LatentCall(call.query_latent, call.query_rope, dequantise(*quantise(call.latent, self.kept)), call.scaling)
        key, value = (dequantise(*quantise(x, self.kept)) for x in (call.key, call.value))
        return AttentionCall(call.query, key, value, call.scaling, call.window, call.softcap, True, ())


def _moved(call: AttentionCall | LatentCall, device: torch.device, dtype: torch.dtype | None) -> AttentionCall | LatentCall:
    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype or x.dtype)

    if isinstance(call, LatentCall):
        return LatentCall(moved(call.query_latent), moved(call.query_rope), moved(call.latent), call.scaling)
    query, key, value = moved(call.query), moved(call.key), moved(call.value)
    return AttentionCall(query, key, value, call.scaling, call.window, call.softcap, True, ())
