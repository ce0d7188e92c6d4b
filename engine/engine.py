"""One model with its device pages: flattened batches of prefill chunks and decode steps in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.blocks import blocks_for
from moonpool.core.config import Config
from moonpool.core.errors import Bug, LayoutMismatch
from moonpool.core.hits import hit_quantum
from moonpool.core.request import Adapter
from moonpool.engine import attention
from moonpool.engine.adapting import choose_adapted, require_fit
from moonpool.engine.backends import Hook, Span
from moonpool.engine.checkpoint import default_cache, kept_as, model_fingerprint
from moonpool.engine.choosing import Chosen, choose
from moonpool.engine.device import described, device_of, view_of
from moonpool.engine.guides import Guides
from moonpool.engine.host_view import HostView, OwnMemory
from moonpool.engine.loading import MemoryBudget, load_model, memory_budget
from moonpool.engine.page_tensor import CPU, PageTensor
from moonpool.engine.pages import PagePool
from moonpool.engine.prompt_scores import PromptScores
from moonpool.engine.scoring import score
from moonpool.engine.tensor_parallel.ranks import Ranks
from moonpool.engine.tensor_parallel.start import ranks_for

__all__ = ["Engine", "MemoryBudget", "Row", "load_engine", "memory_budget"]


@dataclass(slots=True)
class Row:
    """``tokens`` of one sequence at positions ``start ..``; all earlier positions are in the pages of ``table`` already."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]  # pages of positions 0 .. start + len(tokens) - 1, in order; more may follow
    wants_logits: bool  # of the last token
    scores: PromptScores | None = None  # takes what the tokens say of their successors in the prompt
    targets: Sequence[int] = ()  # with ``scores``: those successors, as many as it wants of these tokens
    adapter: str = ""  # digest of the one whose weights are added; empty: the model alone

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        start: int,
        end: int,
        table: Sequence[int],
        *,
        wants_logits: bool,
        scores: PromptScores | None = None,
        adapter: str = "",
    ) -> Row:
        """Tokens [start, end) of ``tokens``."""
        targets = () if scores is None else tokens[start + 1 : start + 1 + scores.wanted(start, end)]
        return cls(tokens[start:end], start, table, wants_logits, scores, targets, adapter)


class Engine:
    """Owns a backend and the page tensor. ``forward`` is for one thread at a time; it sets that thread's torch threads."""

    def __init__(
        self,
        chosen: Chosen,
        memory: PageTensor,
        *,
        max_context: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        freed_byte: int | None,
        guides: Guides,
        hit_quantum: int = 1,
        lost: Future[str] | None = None,
        view: HostView | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        """``view``: what hosts see of the pages; None: the pages themselves. ``hit_quantum``: pages; matches count in multiples
        of it. ``lost``: has a result once the engine computes no more. ``adapters``: digests of those that rows may name."""
        self.layout = memory.layout
        self.backend_name = chosen.backend.name
        self.backend_note = chosen.note
        self.device_note = chosen.where or described(memory.device, memory.kept)
        self.lost = lost
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.adapters = adapters
        self.guides = guides
        self.pages = PagePool(memory.pages, None if freed_byte is None else self._wipe, quantum=hit_quantum)
        self._backend = chosen.backend
        self._torch_threads = chosen.torch_threads
        self.view = OwnMemory(memory) if view is None else view
        self.kv_bytes: NDArray[np.uint8] = self.view.bytes  # whoever writes there says so: ``view.came_in``
        self._freed_byte = freed_byte
        if freed_byte:
            self._wipe(range(memory.pages))

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[Row],
        *,
        before_layer: Hook | None = None,
        on_layer: Hook | None = None,
    ) -> torch.Tensor:
        """float32 [rows that want logits, vocabulary], in the order of ``rows``. ``scores`` of rows are filled.

        ``before_layer(l)`` runs before layer l touches pages; ``on_layer(l)`` once K/V of layer l of all rows are in
        pages. What they raise comes out of here; the pages of these rows then hold garbage and nothing else changed.
        The next call may overwrite the result.
        """
        if torch.get_num_threads() != self._torch_threads:  # a per-thread setting of the OpenMP runtime
            torch.set_num_threads(self._torch_threads)
        spans = self._spans(rows)
        ids = np.array([token for row in rows for token in row.tokens], dtype=np.int64)
        wanted = [at for row, span in zip(rows, spans, strict=True) for at in _wanted(row, span)]
        with self.view.step(spans, before_layer, on_layer) as (before, on):
            logits = self._backend.forward(ids, spans, wanted, before, on)
        return _last(rows, logits.cpu())

    def require_adapter(self, adapter: Adapter | None) -> None:
        """LayoutMismatch unless rows may name it."""
        if adapter is not None and adapter.digest not in self.adapters:
            raise LayoutMismatch(
                f"adapter {adapter.name!r} with digest {adapter.digest} is not loaded here; start gateway and workers with the "
                "same model.adapters, and the same files in these directories"
            )

    def copy_page(self, source: int, target: int) -> None:
        """All layers of page ``source`` into ``target``: the private copy of a shared last block."""
        self.view.copy_page(source, target)

    def close(self) -> None:
        """Drop weights and pages. Views of ``kv_bytes`` that others hold keep the page memory alive."""
        if self._freed_byte is not None:
            self._wipe(range(self.pages.total))
        self._backend.close()
        del self._backend, self.view, self.kv_bytes

    def _wipe(self, pages: Sequence[int]) -> None:
        assert self._freed_byte is not None
        self.view.fill(pages, self._freed_byte)

    def _spans(self, rows: Sequence[Row]) -> list[Span]:
        if not rows:
            raise Bug("a forward pass without rows")
        spans: list[Span] = []
        first = 0
        for row in rows:
            count, end = len(row.tokens), row.start + len(row.tokens)
            n = blocks_for(end, self.layout.block_tokens)
            if not count or row.start < 0 or end > self.max_context or len(row.table) < n:
                raise Bug(
                    f"row of {count} tokens from {row.start} with {len(row.table)} pages; "
                    f"needs 1 token or more, {n} pages, and an end within {self.max_context}"
                )
            spans.append(Span(first, count, row.start, np.asarray(row.table[:n], dtype=np.int64), row.adapter))
            if row.adapter and row.adapter not in self.adapters:
                raise Bug(f"a row names the adapter {row.adapter!r}, which is not loaded")
            first += count
        return spans


def _wanted(row: Row, span: Span) -> list[int]:
    """The tokens of the batch whose logits ``row`` asks for."""
    last = [span.first + span.count - 1] if row.wants_logits else []
    return [*range(span.first, span.first + len(row.targets)), *last]


def _last(rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    """Of all ``wanted`` logits those that are sampled from, in float32; the others go into the scores of their rows."""
    at, last = 0, []
    for row in rows:
        if row.scores is not None and row.targets:
            scored = logits[at : at + len(row.targets)]
            row.scores.put(row.start, score(scored, row.targets, row.scores.width))
            at += len(row.targets)
        if row.wants_logits:
            last.append(at)
            at += 1
    return logits.float() if len(last) == at else logits[torch.tensor(last, dtype=torch.int64)].float()


def load_engine(
    config: Config,
    model_dir: Path,
    *,
    threads: int,
    own_threads: int | None = None,
    pages: int | None = None,
    cache: Path | None = None,
    make_view: Callable[[PageTensor], HostView] = view_of,
) -> Engine:
    """Load ``model_dir``. UnsupportedModel names what the engine refuses; ConfigError: files or memory are missing.

    ``threads``: of PyTorch's kernels; ``own_threads``: of a backend that has its own, as many where not given. ``pages``
    overrides the configuration; ``cache`` keeps model fingerprints (default: the user's cache folder).
    ``make_view`` says what hosts see of the pages, unless ranks keep them apart.
    """
    require_fit(config)
    budget = memory_budget(config, model_dir, pages=pages)
    budget.require()
    ranks = ranks_for(config, model_dir)
    try:
        return _load(config, model_dir, budget, threads, own_threads or threads, cache or default_cache(), ranks, make_view)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _load(
    config: Config,
    model_dir: Path,
    budget: MemoryBudget,
    threads: int,
    own_threads: int,
    cache: Path,
    ranks: Ranks | None,
    make_view: Callable[[PageTensor], HostView],
) -> Engine:
    attention.register()
    # Loading stays out of OpenMP: a second team of threads beside the compute thread's own makes both yield instead of spin.
    torch.set_num_threads(1)
    device, kept = device_of(config), config.engine.kv_dtype
    if ranks is not None:
        device = CPU  # from where each rank gets its part of the weights; this one, too
    model, facts = load_model(config, model_dir, device)
    fingerprint = kept_as(model_fingerprint(model_dir, cache), kept)
    layout = facts.shape.layout(fingerprint, config.model.dtype, config.engine.block_tokens)
    shared = None if ranks is None else ranks.share_pages(budget.pages * layout.block_bytes)
    memory = PageTensor(layout, budget.pages, memory=shared, device=device, kept=kept if ranks is None else "auto")
    with device:  # what is made without saying where
        if config.model.adapters:
            chosen, adapters = choose_adapted(config, model_dir, model, facts, memory, threads, cache)
        else:
            chosen, adapters = choose(config, model_dir, model, facts, memory, threads, own_threads, ranks), frozenset[str]()
    return Engine(
        chosen,
        memory,
        max_context=facts.max_context,
        vocab_size=facts.vocab_size,
        eos_ids=facts.eos_ids,
        freed_byte=config.freed_byte,
        guides=Guides(model_dir, facts.vocab_size, facts.eos_ids),
        hit_quantum=hit_quantum(config.security.min_hit_tokens, config.engine.block_tokens),
        lost=None if ranks is None else ranks.lost,
        view=make_view(memory) if chosen.view is None else chosen.view,
        adapters=adapters,
    )
