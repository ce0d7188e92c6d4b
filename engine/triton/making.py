"""From a model to a backend whose attention is Triton's; where there is a GPU measured, compiled and captured."""

from __future__ import annotations

import numpy as np
import torch

from moonpool.core.blocks import blocks_for
from moonpool.core.config import EngineConfig
from moonpool.engine.backends import Backend, Span
from moonpool.engine.families import known, recipe_of
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.loading import ModelFacts
from moonpool.engine.module_backend import ModuleBackend
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.triton.answers import Answers
from moonpool.engine.triton.backend import TritonBackend
from moonpool.engine.triton.interpreting import compiled_for
from moonpool.engine.triton.step import triton_step

_MEASURED_CONTEXT = 8_192  # tokens that rows have when tiles are measured, where there are so many


@torch.inference_mode()
def triton_backend(engine: EngineConfig, model: torch.nn.Module, facts: ModelFacts, memory: PageTensor) -> TritonBackend:
    """It owns ``model``, whose weights may have moved into it. Pages are zero afterwards.

    A family that has a recipe is computed from that; any other by its own modules, whose code may wait for the device, and so
    without graphs. The same goes for experts: which tokens each of them gets is read on the host.
    """
    recipe = recipe_of(model, facts.max_context) if known(model) else None
    if recipe is None:
        made = TritonBackend(ModuleBackend(model, memory, triton_step), None)
    else:
        whole = FusedBackend(recipe, memory, triton_step)
        fixed = all(layer.experts is None for layer in recipe.layers)
        answers = Answers(whole, memory, engine.max_batch, facts.max_context) if fixed else None
        made = TritonBackend(whole, answers)
    if compiled_for(memory.device):
        warm(made, memory, facts, chunk=engine.prefill_chunk, answers=engine.max_batch)
    return made


def warm(backend: TritonBackend, memory: PageTensor, facts: ModelFacts, *, chunk: int, answers: int) -> None:
    """``measure``, then graphs."""
    measure(backend, memory, facts, chunk=chunk, answers=answers)
    backend.capture_all()
    memory.fill(range(memory.pages), 0)


@torch.inference_mode()
def measure(backend: Backend, memory: PageTensor, facts: ModelFacts, *, chunk: int, answers: int) -> None:
    """Steps of the usual sizes, so that kernels are compiled and their tiles measured on them, not in somebody's first token.
    Pages, whose content does not matter, are shared by all rows, and zero afterwards."""
    context = min(_MEASURED_CONTEXT, facts.max_context, memory.pages * memory.layout.block_tokens)
    fresh = min(chunk, context)
    for spans in ([_row(0, fresh, context, memory)], [_row(i, 1, context, memory) for i in range(answers)]):
        _compute(backend, spans)
        _compute(backend, spans[:1])
    memory.fill(range(memory.pages), 0)


def _row(first: int, count: int, end: int, memory: PageTensor) -> Span:
    return Span(first, count, end - count, np.arange(blocks_for(end, memory.layout.block_tokens)))


def _compute(backend: Backend, spans: list[Span]) -> None:
    """Launch by launch: a hook that does nothing keeps steps of answers from being captured before they are measured."""
    tokens = sum(span.count for span in spans)
    backend.forward(np.zeros(tokens, dtype=np.int64), spans, [tokens - 1], None, lambda layer: None)
