"""What the kernels of a worker on a GPU reach, beside what the device's own copies and products reach in the same run.

    copy_gbs                                one large copy on the device: bytes read and bytes written
    gemm_tflops                             one large product in bfloat16
    pinned_to_host_gbs, .._to_device_gbs    one large copy to and from page-locked memory
    KEPT_decode_CONTEXT_BATCH_gbs           K/V read by one token of each of BATCH rows; .._over_copy beside ``copy_gbs``
    mla_decode_CONTEXT_BATCH_gbs            the same of latents, which all heads share; .._tflops, because it multiplies more
    prefill_PREFIX_tflops, .._over_gemm     a chunk of a prompt behind so many tokens
    KEPT_write_gbs, .._pack_gbs, .._unpack_gbs, each with .._over_copy: bytes read and bytes written
    view_to_host_gbs, view_to_device_gbs    slices through the host's view, canonical bytes, each with .._over_pinned

KEPT says how pages keep K/V: ``bfloat16``, ``int8`` or ``fp8``. Calls are captured as CUDA graphs, so that no launch from
Python is in a figure, and go through different pages, so that K/V do not come from the device's cache. Best of ``rounds``.
What does not fit into half of the free memory is left out. On a CPU the same code runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from moonpool.bench.gpu_clock import DeviceClock
from moonpool.core.blocks import blocks_for
from moonpool.core.layout import MLA, KVLayout
from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.backends import Span
from moonpool.engine.device import page_bytes, view_of
from moonpool.engine.host_view import StagedView
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.quantised import Kept

if TYPE_CHECKING:  # their module loads triton, which is not everywhere
    from moonpool.engine.triton.plans import StepPlan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The heads are those of an 8-billion-parameter Llama, and of DeepSeek-V2-Lite for latents."""

    rounds: int = 10
    contexts: tuple[int, ...] = (1_024, 8_192, 32_768)
    batches: tuple[int, ...] = (1, 16, 64)
    prefixes: tuple[int, ...] = (0, 8_192, 32_768)
    chunk: int = 2_048
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    latent_heads: int = 16
    rank: int = 512
    rope: int = 64
    block: int = 64
    layers: int = 2
    copy_bytes: int = _GIB
    gemm: int = 8_192
    spread_bytes: int = _GIB // 2  # that the calls of one figure go through
    moved_pages: int = 256
    kept: tuple[Kept, ...] = ("auto", "int8", "fp8")


def trouble() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return f"there is no GPU that torch {torch.__version__}, {build}, can use"
    try:
        from moonpool.engine.triton.interpreting import INTERPRETED
    except ImportError as e:
        return f"triton does not load ({e})"
    return "TRITON_INTERPRET is set: kernels would run on the CPU" if INTERPRETED else None


@torch.inference_mode()
def gpu(options: GpuOptions | None = None, device: torch.device | None = None) -> dict[str, float | str]:
    options, device = options or GpuOptions(), device or torch.device("cuda", torch.cuda.current_device())
    bench = _Bench(options, device)
    figures: dict[str, float | str] = {"device": bench.name(), "torch": torch.__version__, **bench.ceilings()}
    for kept in options.kept:
        figures |= bench.kept(kept)
    return figures | bench.latents()


class _Bench:
    def __init__(self, options: GpuOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        self._on_gpu = device.type == "cuda"
        self._clock = DeviceClock(device, options.rounds)
        self._copy = self._gemm = self._out = self._in = 1.0  # GB/s, TFLOP/s, GB/s, GB/s

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._on_gpu else "cpu"

    # -- ceilings ----------------------------------------------------------------------------------------------------

    def ceilings(self) -> dict[str, float]:
        size, n = self._options.copy_bytes, self._options.gemm
        source = torch.ones(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        host = torch.ones(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._copy = 2 * size / self._clock.seconds([lambda: target.copy_(source)]) / 1e9
        square = torch.randn((n, n), device=self._device).to(torch.bfloat16)
        self._gemm = 2 * n**3 / self._clock.seconds([lambda: square @ square]) / 1e12
        self._out = size / self._clock.seconds([lambda: host.copy_(source, non_blocking=True)]) / 1e9
        self._in = size / self._clock.seconds([lambda: target.copy_(host, non_blocking=True)]) / 1e9
        return {
            "copy_gbs": self._copy,
            "gemm_tflops": self._gemm,
            "pinned_to_host_gbs": self._out,
            "pinned_to_device_gbs": self._in,
        }

    # -- kernels -----------------------------------------------------------------------------------------------------

    def kept(self, kept: Kept) -> dict[str, float]:
        o = self._options
        layout = KVLayout("bench", o.layers, o.kv_heads, o.dim, "bfloat16", o.block)
        memory = self._memory(layout, kept)
        name = "bfloat16" if kept == "auto" else kept
        out: dict[str, float] = {}
        for context, batch, plans in self._answers(memory, layout, kept):
            query = self._random((o.heads, batch, o.dim))
            call = AttentionCall(query, query[:0], query[:0], o.dim**-0.5, None, None, True, ())
            taken = self._clock.seconds([self._attend(memory, plan, call, i % o.layers) for i, plan in enumerate(plans)])
            out |= self._read(f"{name}_decode_{context}_{batch}", batch * context * _token_bytes(layout, kept), taken)
        if kept == "auto":
            out |= self._prefill(memory)
            out |= self._view(layout)
        return out | self._moves(memory, name)

    def _attend(self, memory: PageTensor, plan: StepPlan, call: AttentionCall, layer: int) -> Callable[[], object]:
        from moonpool.engine.triton import calls

        heads, tokens, dim = call.query.shape
        out = call.query.new_empty((tokens, heads, dim))

        def attend() -> None:
            calls.decode_attention(memory, plan, layer, call, out)
            calls.prefill_attention(memory, plan, layer, call, out)

        return attend

    def _prefill(self, memory: PageTensor) -> dict[str, float]:
        o = self._options
        out: dict[str, float] = {}
        for prefix in o.prefixes:
            table = np.arange(blocks_for(prefix + o.chunk, o.block), dtype=np.int64)
            if len(table) > memory.pages:
                continue
            query = self._random((o.heads, o.chunk, o.dim))
            call = AttentionCall(query, query[:0], query[:0], o.dim**-0.5, None, None, True, ())
            plan = self._plan([Span(0, o.chunk, prefix, table)])
            taken = self._clock.seconds([self._attend(memory, plan, call, layer) for layer in range(o.layers)])
            pairs = o.chunk * prefix + o.chunk * (o.chunk + 1) // 2
            rate = 4 * o.heads * o.dim * pairs / taken / 1e12
            out |= {f"prefill_{prefix}_tflops": rate, f"prefill_{prefix}_over_gemm": rate / self._gemm}
        return out

    def _moves(self, memory: PageTensor, name: str) -> dict[str, float]:
        """K/V of a chunk into pages, and slices out of pages and back."""
        from moonpool.engine.triton import calls
        from moonpool.engine.triton.packing import TritonPacking

        o, layout = self._options, memory.layout
        pages = list(range(min(o.moved_pages, memory.pages)))
        tokens = min(o.chunk, len(pages) * o.block)
        fresh = [self._random((o.kv_heads, tokens, o.dim)) for _ in range(2)]
        plan = self._plan([Span(0, tokens, 0, np.arange(blocks_for(tokens, o.block), dtype=np.int64))])
        canonical, kept = layout.token_bytes // layout.layers, _token_bytes(layout, memory.kept)
        writes = [partial(calls.write_kv, memory, plan, layer, *fresh) for layer in range(o.layers)]
        out = self._read(f"{name}_write", tokens * (canonical + kept), self._clock.seconds(writes))
        packing, valid = TritonPacking(memory), [o.block] * len(pages)
        data = packing.pack(pages, 0, valid)
        moved = len(pages) * o.block * (canonical + kept)
        out |= self._read(f"{name}_unpack", moved, self._clock.alone(lambda: packing.unpack(pages, 0, data)))
        return out | self._read(f"{name}_pack", moved, self._clock.alone(lambda: packing.pack(pages, 0, valid)))

    def latents(self) -> dict[str, float]:
        from moonpool.engine.triton import calls

        o = self._options
        layout = KVLayout("bench", o.layers, 1, o.rank + o.rope, "bfloat16", o.block, kind=MLA)
        memory = self._memory(layout, "auto")
        out: dict[str, float] = {}
        for context, batch, plans in self._answers(memory, layout, "auto"):
            latent, rope = (self._random((o.latent_heads, batch, width)) for width in (o.rank, o.rope))
            row = self._random((batch, o.rank + o.rope))
            call = LatentCall(query_latent=latent, query_rope=rope, latent=row, scaling=0.07)
            attended = latent.new_empty((batch, o.latent_heads, o.rank))
            every = [
                partial(calls.latent_attention, memory, plan, i % o.layers, call, attended) for i, plan in enumerate(plans)
            ]
            taken = self._clock.seconds(every)
            name = f"mla_decode_{context}_{batch}"
            out |= self._read(name, batch * context * _token_bytes(layout, "auto"), taken)
            flops = 2 * batch * context * o.latent_heads * (2 * o.rank + o.rope)
            out[f"{name}_tflops"] = flops / taken / 1e12
        return out

    def _view(self, layout: KVLayout) -> dict[str, float]:
        """Through the host's view: packed and copied, copied and unpacked; both memories' bytes are canonical."""
        memory = PageTensor(layout, self._options.moved_pages, device=self._device)  # all of it is page-locked on the host, too
        view = view_of(memory)
        if not isinstance(view, StagedView):  # pages are host memory
            return {}
        pages = list(range(memory.pages))
        size = len(pages) * memory.layout.slice_bytes
        fresh = dict.fromkeys(pages, memory.layout.block_tokens)

        def bring() -> None:
            view.came_in(0, pages)
            view.landed(0)

        out, into = (size / self._clock.waited(run) / 1e9 for run in (lambda: view.send(0, fresh).wait(), bring))
        return {
            "view_to_host_gbs": out,
            "view_to_host_over_pinned": out / self._out,
            "view_to_device_gbs": into,
            "view_to_device_over_pinned": into / self._in,
        }

    # -- what they work on -------------------------------------------------------------------------------------------

    def _memory(self, layout: KVLayout, kept: Kept) -> PageTensor:
        """As many pages as the largest figure needs, and half of what is free takes."""
        o = self._options
        wanted = max(max(o.batches) * blocks_for(max(o.contexts), o.block), blocks_for(max(o.prefixes) + o.chunk, o.block))
        room = torch.cuda.mem_get_info(self._device)[0] // 2 // page_bytes(layout, kept) if self._on_gpu else wanted
        memory = PageTensor(layout, max(min(wanted, room), o.moved_pages), device=self._device, kept=kept)
        if memory.exponents is None:
            memory.tensor.normal_()
        else:
            memory.tensor.view(torch.uint8).random_(0, 0x70)  # no NaN of fp8 among them
            memory.exponents.random_(120, 128)
        return memory

    def _answers(self, memory: PageTensor, layout: KVLayout, kept: Kept) -> Iterator[tuple[int, int, list[StepPlan]]]:
        """Each context and batch that fits, with plans that go through different pages."""
        o = self._options
        for context in o.contexts:
            for batch in o.batches:
                pages = batch * blocks_for(context, o.block)
                turns = min(32, memory.pages // pages, 1 + o.spread_bytes // (batch * context * _token_bytes(layout, kept)))
                if turns:
                    yield context, batch, [self._rows(context, batch, turn * pages) for turn in range(turns)]

    def _rows(self, context: int, batch: int, first: int) -> StepPlan:
        each = blocks_for(context, self._options.block)
        tables = np.random.default_rng(first).permutation(np.arange(first, first + batch * each)).reshape(batch, each)
        return self._plan([Span(i, 1, context - 1, table) for i, table in enumerate(tables)])

    def _plan(self, spans: list[Span]) -> StepPlan:
        from moonpool.engine.triton.plans import StepPlan

        return StepPlan.of(spans, self._device)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

    def _read(self, name: str, size: int, taken: float) -> dict[str, float]:
        rate = size / taken / 1e9
        return {f"{name}_gbs": rate, f"{name}_over_copy": rate / self._copy}


def _token_bytes(layout: KVLayout, kept: Kept) -> int:
    """Of one token in one layer, as pages keep it."""
    return page_bytes(layout, kept) // layout.layers // layout.block_tokens
