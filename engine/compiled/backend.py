"""The compiled step as a backend: packed weights, buffers, the crew, and the hooks between layers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.engine.backends import Hook, Span
from moonpool.engine.compiled import matrix, phases, planning, step
from moonpool.engine.compiled.buffers import LEAST_SETS, RING_BYTES, places_in_set, places_of_thread, widest_input, width
from moonpool.engine.compiled.cpu import may_use_matrix_unit
from moonpool.engine.compiled.crew import dismiss, fresh_sync
from moonpool.engine.compiled.features import suits_matrix_unit
from moonpool.engine.compiled.lanes import LOG2E
from moonpool.engine.compiled.packing import by_turns, pack, pack_bias, padded
from moonpool.engine.compiled.records import LAYER, MERGE, MODEL, TASK, WORK, one
from moonpool.engine.kernel_cache import compiling
from moonpool.engine.recipe import Projection, Recipe

log = logging.getLogger(__name__)

_GATES = {"silu": (1.0, 0.0), "gelu_tanh": (1.5957691216057308, 0.07135481627260025)}
_ALIGN = 4096
_KEPT_LOGITS = 64  # rows of logits that stay allocated

Address = int


class CompiledBackend:
    """Owns packed weights and its threads; pages belong to the engine. See ``moonpool.engine.compiled``."""

    name = "compiled"

    def __init__(self, recipe: Recipe, layout: KVLayout, pages: torch.Tensor, *, threads: int, step_tokens: int) -> None:
        """``pages``: bf16 in canonical order. ``step_tokens``: of a usual step at most; larger ones work, and take memory.

        The weights of ``recipe`` move: all but its embedding and norms are empty afterwards.
        """
        self._recipe, self._layout, self._threads = recipe, layout, threads
        self._kept: list[Any] = [pages]  # whatever the records hold addresses of
        self._longest = recipe.rotaries[0].cos.shape[0]
        self._models = one(MODEL)
        self._layers = np.zeros(len(recipe.layers), LAYER)
        self._works = one(WORK)
        self._board = np.zeros(0, np.uint8)
        self._buffers: list[Any] = []
        self._capacity = 0  # tokens of a step; none while there is no crew or it knows no buffers
        self._crew: list[threading.Thread] = []
        self._sync = fresh_sync(threads)
        self._in_matrix = suits_matrix_unit(recipe) and may_use_matrix_unit()
        self._fill_model(pages)
        self._fill_layers()
        self._allocate(step_tokens)
        self._logits = np.empty((_KEPT_LOGITS, int(self._models[0]["vocabulary"])), np.float32)
        self._warm_up()
        self._muster()

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        """float32; see ``Backend``."""
        if len(ids) > self._capacity:
            self._dismiss()
            self._allocate(len(ids))
            self._muster()
        logits = self._logits_for(len(wanted))
        kept = self._plan(ids, spans, wanted, logits)
        layers = len(self._layers)
        if before_layer is None and on_layer is None:
            self._run(0, layers, embeds=True, writes=True, mixes=True, ends=bool(wanted))
        else:
            for layer in range(layers):
                if before_layer is not None:
                    before_layer(layer)
                self._run(layer, layer + 1, embeds=layer == 0, writes=True)
                if on_layer is not None:
                    on_layer(layer)
                self._run(layer, layer + 1, mixes=True, ends=bool(wanted) and layer == layers - 1)
        del kept
        return self._recipe.capped(torch.from_numpy(logits[:, : self._recipe.vocabulary]))

    def close(self) -> None:
        self._dismiss()
        self._kept.clear()
        self._buffers.clear()

    def _run(
        self, first: int, last: int, *, embeds: bool = False, writes: bool = False, mixes: bool = False, ends: bool = False
    ) -> None:
        work = self._works[0]
        work["first_layer"], work["last_layer"] = first, last
        work["embeds"], work["writes"], work["mixes"], work["ends"] = embeds, writes, mixes, ends
        self._board[: self._rows(last - first) * int(work["row_bytes"])] = 0
        step.run(self._models, self._layers, self._works, self._tasks, self._merges, self._sync, 0)

    def _plan(self, ids: NDArray[np.int64], spans: Sequence[Span], wanted: Sequence[int], logits: Any) -> list[Any]:
        """Fill the step's record; returns what must live until the step is over."""
        layout, work = self._layout, self._works[0]
        n = len(spans)
        rows = np.empty((3, n), np.int64)
        rows[0] = [span.start for span in spans]
        rows[1] = [span.count for span in spans]
        sizes = [len(span.table) for span in spans]
        rows[2, 0] = 0
        np.cumsum(sizes[:-1], out=rows[2, 1:])
        tables = np.concatenate([span.table for span in spans])
        wanted_at = np.array(wanted, np.int64)
        page_bytes = self._models[0]["page_bytes"]
        planning.place_tokens(
            rows[0], rows[1], rows[2], tables, page_bytes, layout.block_tokens, layout.row_bytes, self._positions, self._places
        )
        group = self._recipe.heads // layout.kv_heads
        tasks, merges, partials = planning.plan_tasks(
            rows[0], rows[1], rows[2], layout.kv_heads, group, layout.head_dim, self._threads, self._tasks, self._merges
        )
        self._order[:tasks] = planning.heaviest_first(self._tasks[:tasks])
        self._lay_out(len(ids), tasks, partials)
        work["tile_rows"] = self._tile_rows(len(ids), int(rows[1].max()))
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        work["tokens"], work["wanted_count"], work["task_count"], work["merge_count"] = len(ids), len(wanted), tasks, merges
        work["ids"], work["wanted"], work["tables"] = ids.ctypes.data, wanted_at.ctypes.data, tables.ctypes.data
        work["logits"] = logits.ctypes.data
        return [ids, wanted_at, tables]

    def _tile_rows(self, tokens: int, most: int) -> int:
        """Rows of numbers that a register of the matrix unit has to hold. ``most``: tokens of the longest row of the batch."""
        if not self._in_matrix:
            return 0
        group = self._recipe.heads // self._layout.kv_heads
        return min(max(tokens, most * group), matrix.TILE_ROWS)

    def _logits_for(self, rows: int) -> NDArray[np.float32]:
        if rows <= _KEPT_LOGITS:
            return self._logits[:rows]
        return np.empty((rows, self._logits.shape[1]), np.float32)

    def _lay_out(self, tokens: int, tasks: int, partials: int) -> None:
        """The ring and the board of a step."""
        work = self._works[0]
        fields, size = places_in_set(self._recipe, tokens, partials)
        for name, at in fields.items():
            work[name] = at
        work["set_bytes"] = size
        work["sets"] = max(LEAST_SETS, min(len(self._layers) + 1, RING_BYTES // size))
        recipe, vocabulary = self._recipe, int(self._models[0]["vocabulary"])
        outputs = max(width(recipe), recipe.hidden)
        units = step.most_units(tokens, tasks, 2 * recipe.intermediate, outputs, vocabulary, self._threads)
        work["row_bytes"] = row = phases.row_bytes(self._threads, units)
        if len(self._board) < row * self._rows(len(self._layers)):
            self._board = _aligned(row * self._rows(len(self._layers)))
        work["board"] = self._board.ctypes.data

    @staticmethod
    def _rows(layers: int) -> int:
        return step.OTHER_PHASES + step.PHASES * layers

    def _allocate(self, tokens: int) -> None:
        """Buffers for steps of ``tokens`` tokens. No crew may be at work: it knows the former ones."""
        self._buffers = []
        self._behind = matrix.TILE_ROWS * widest_input(self._recipe) * 2  # the matrix unit reads rows that nobody wants
        recipe, layout, work = self._recipe, self._layout, self._works[0]
        most = planning.most_tasks(tokens, layout.kv_heads, self._longest, self._threads)
        self._tasks = np.zeros(most, TASK)
        self._merges = np.zeros(most, MERGE)
        self._order = np.zeros(most, np.int64)
        self._positions, self._places = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        fields, scratch = places_of_thread(recipe)
        for name, at in fields.items():
            self._models[0][name] = at
        self._models[0]["scratch_bytes"] = scratch
        partials = planning.most_partials(layout.head_dim, self._longest, self._threads)
        largest = max(places_in_set(recipe, n, partials)[1] for n in (tokens, step.FEW_TOKENS))
        work["ring"] = self._buffer(max(RING_BYTES, LEAST_SETS * largest))
        work["scratch"] = self._buffer(self._threads * scratch)
        work["last"] = self._buffer(max(tokens, _KEPT_LOGITS) * recipe.hidden * 2)
        for name, array in (("positions", self._positions), ("places", self._places), ("order", self._order)):
            work[name] = array.ctypes.data
        work["threads"] = self._threads

    def _buffer(self, size: int) -> Address:
        self._buffers.append(_aligned(size + self._behind))
        start: int = self._buffers[-1].ctypes.data
        return start

    def _warm_up(self) -> None:
        """Compile, or load what was compiled before."""
        begun = time.monotonic()
        with compiling():
            self._plan(np.zeros(1, np.int64), [Span(0, 1, 0, np.zeros(1, np.int64))], (), self._logits)
            self._works[0]["tokens"], self._works[0]["threads"] = 0, 1
            self._run(0, 0)
        self._works[0]["threads"] = self._threads
        log.info("kernels are ready after %.1f s", time.monotonic() - begun)

    def _muster(self) -> None:
        self._sync = fresh_sync(self._threads)
        shared = (self._models, self._layers, self._works, self._tasks, self._merges, self._sync)
        for number in range(1, self._threads):
            # A daemon: a worker that dies without closing its engine must not hang at its end.
            helper = threading.Thread(target=step.run, args=(*shared, number), name=f"compute {number}", daemon=True)
            helper.start()
            self._crew.append(helper)
        self._capacity = len(self._positions)

    def _dismiss(self) -> None:
        self._capacity = 0
        if self._crew:
            dismiss(self._sync)
        for helper in self._crew:
            helper.join()
        self._crew.clear()

    def _fill_model(self, pages: torch.Tensor) -> None:
        recipe, layout, model = self._recipe, self._layout, self._models[0]
        model["hidden"], model["heads"] = recipe.hidden, recipe.heads
        model["kv_heads"], model["head_dim"], model["intermediate"] = layout.kv_heads, layout.head_dim, recipe.intermediate
        model["embedding"], model["vocabulary"] = self._hold(recipe.embedding), padded(recipe.head.weight.shape[0])
        model["head"], model["head_bias"] = self._packed(recipe.head, keep=recipe.head.weight is recipe.embedding)
        model["final_norm"] = self._hold(recipe.final_norm.float())
        model["pages"], model["page_bytes"], model["layer_bytes"] = pages.data_ptr(), layout.block_bytes, layout.slice_bytes
        model["plane_bytes"], model["block_tokens"] = layout.block_tokens * layout.row_bytes, layout.block_tokens
        cap = recipe.attention_softcap
        model["shapes"] = self._hold(torch.from_numpy(matrix.shapes()))
        model["eps"], model["embedding_scale"], model["scaling"] = recipe.eps, recipe.embedding_scale, recipe.scaling
        model["softcap"], model["score_scale"] = cap or 0.0, LOG2E if cap else recipe.scaling * LOG2E
        model["gate_linear"], model["gate_cubic"] = _GATES[recipe.activation]

    def _fill_layers(self) -> None:
        turns = [(self._hold(rotary.cos), self._hold(rotary.sin)) for rotary in self._recipe.rotaries]
        for record, layer in zip(self._layers, self._recipe.layers, strict=True):
            for name in ("attention_norm", "query_norm", "key_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm"):
                weight: torch.Tensor | None = getattr(layer, name)
                record[name] = 0 if weight is None else self._hold(weight.float())
            record["qkv"], record["qkv_bias"] = self._packed(layer.qkv)
            record["out"], record["out_bias"] = self._packed(layer.out)
            assert layer.gate_up is not None and layer.down is not None  # recipes without are unfit
            bias = None if layer.gate_up.bias is None else by_turns(layer.gate_up.bias)
            record["gate_up"], record["gate_up_bias"] = self._packed(Projection(by_turns(layer.gate_up.weight), bias))
            layer.gate_up.let_go()
            record["down"], record["down_bias"] = self._packed(layer.down)
            record["window"] = layer.window or 0
            record["cos"], record["sin"] = turns[layer.rotary]

    def _packed(self, projection: Projection, *, keep: bool = False) -> tuple[Address, Address]:
        """Unless ``keep``, the packed copy takes the place of the weight, whose memory is let go at once."""
        outputs = projection.weight.shape[0]
        packed = self._hold(pack(projection.weight))
        if not keep:
            projection.let_go()
        return packed, self._hold(pack_bias(projection.bias, outputs))

    def _hold(self, tensor: torch.Tensor) -> Address:
        """Keep ``tensor`` alive; where its numbers are."""
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeros that begin with a page: of a board that begins elsewhere than its array, not all would be cleared before a run."""
    raw = np.zeros(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + size]
