"""A short batch that a backend computes before it serves: prompts of two lengths, then one more token of each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.blocks import blocks_for
from moonpool.engine.backends import Backend, Span
from moonpool.engine.loading import ModelFacts
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.quantised import Kept
from moonpool.engine.refusals import refuse

_LENGTHS = (45, 9)  # tokens; over a border of blocks and within one
_SEED = 1

# Rounding moves logits by up to a tenth of their spread in bfloat16 (the module rounds more often than the others) and by a
# millionth in float32; a wrong weight, angle, norm or activation moves them by about all of it.
_LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
_LIMIT_OF_EIGHT_BITS = 0.25  # of pages that round K and V to less than bfloat16 has


class Trial:
    def __init__(self, memory: PageTensor, facts: ModelFacts, adapter: str = "") -> None:
        """``adapter``: the digest that all rows name."""
        self._memory, self._adapter = memory, adapter
        rows = min(len(_LENGTHS), memory.pages)
        room = min(memory.pages // rows * memory.layout.block_tokens, facts.max_context)
        draw = np.random.default_rng(_SEED)
        self._rows = [draw.integers(0, facts.vocab_size, min(n, room), dtype=np.int64) for n in _LENGTHS[:rows]]

    @torch.inference_mode()
    def answers(self, backend: Backend) -> torch.Tensor:
        """float32 [rows and steps, vocabulary]: all but the last token of each row, then that. Pages are zero again after."""
        prompts = self._step(backend, [(0, len(row) - 1) for row in self._rows])
        outputs = self._step(backend, [(len(row) - 1, len(row)) for row in self._rows])
        self._memory.fill(range(sum(self._blocks())), 0)
        return torch.cat([*prompts, *outputs])

    def _blocks(self) -> list[int]:
        return [blocks_for(len(row), self._memory.layout.block_tokens) for row in self._rows]

    def _step(self, backend: Backend, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Logits of the last token of each row's part, if there is any part at all."""
        ids: list[NDArray[np.int64]] = []
        spans: list[Span] = []
        page = first = 0
        for row, blocks, (start, end) in zip(self._rows, self._blocks(), parts, strict=True):
            table = np.arange(page + blocks - 1, page - 1, -1, dtype=np.int64)  # not in order, as in service
            page += blocks
            if end > start:
                pages = table[: blocks_for(end, self._memory.layout.block_tokens)]
                spans.append(Span(first, end - start, start, pages, self._adapter))
                ids.append(row[start:end])
                first += end - start
        if not spans:
            return []
        wanted = [span.first + span.count - 1 for span in spans]
        return [backend.forward(np.concatenate(ids), spans, wanted, None, None).float().clone()]


def plain_memory(memory: PageTensor) -> PageTensor:
    """``memory``, or pages enough for a trial that are as it would be in the dtype of the model."""
    if memory.kept == "auto":
        return memory
    pages = len(_LENGTHS) * blocks_for(max(_LENGTHS), memory.layout.block_tokens)
    return PageTensor(memory.layout, min(memory.pages, pages), device=memory.device)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far ``got`` is from ``want`` over how far ``want`` spreads around its mean, both as root mean squares."""
    spread = (want - want.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    return float((got - want).square().mean().sqrt() / spread)


def disagreement(got: torch.Tensor, want: torch.Tensor, memory: PageTensor, kept: Kept | None = None) -> str | None:
    """Why a backend over ``memory`` that answers ``got`` may not serve, where the module answers ``want``; None: it may.

    ``kept``: how pages are that it keeps beside ``memory``; None: it keeps none. UnsupportedModel where the module itself
    answers what is no number.
    """
    if not bool(want.isfinite().all()):
        raise refuse("its own code computes logits that are no numbers: its weights hold infinity or NaN", "fetch it again")
    apart = difference(got, want)
    limit = _LIMITS[memory.layout.dtype] if (kept or memory.kept) == "auto" else _LIMIT_OF_EIGHT_BITS
    if apart <= limit:  # never of NaN
        return None
    return f"its logits differ from those of the model's own code by {apart:.3g} of their spread, {limit:g} is allowed"
