"""Rank 0 of a worker: tells the others what to compute, computes its own part, and runs the hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.errors import TransferFailed
from moonpool.engine.backends import Hook, Span
from moonpool.engine.host_view import HostView
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.recipe import Layer, Recipe
from moonpool.engine.tensor_parallel.groups import group_of
from moonpool.engine.tensor_parallel.keeping import placed
from moonpool.engine.tensor_parallel.line import Step
from moonpool.engine.tensor_parallel.meeting import Meeting, Parted, Stopped
from moonpool.engine.tensor_parallel.moves import RanksView
from moonpool.engine.tensor_parallel.part import part_of
from moonpool.engine.tensor_parallel.rank import Start
from moonpool.engine.tensor_parallel.ranks import Ranks
from moonpool.engine.tensor_parallel.sharding import Share, columns, let_go, shared, shared_layer


class ParallelBackend:
    """A recipe on several ranks. It ends the other ranks when it is closed.

    ``view``: what hosts see of pages that ranks keep apart; None: they share those that ``memory`` is.
    """

    @torch.inference_mode()
    def __init__(self, recipe: Recipe, memory: PageTensor, ranks: Ranks, threads: int) -> None:
        """``memory``, of the host, is what the ranks share: pages of all heads, or the host's view of those that they keep.
        ``threads``: of each rank. PeerSilent where a rank ends meanwhile.

        ``recipe`` gives its weights away, layer by layer: never more than one layer lies in memory twice.
        """
        self._ranks, keeping = ranks, ranks.keeping
        self.name = "triton" if keeping.attention == "triton" else "fused"
        size, device = ranks.count + 1, keeping.device_of(0)
        width = columns(recipe.vocabulary, size)
        try:
            self._introduce(recipe, memory, threads, width)
            own = replace(placed(shared(recipe, Share(0, size), ()), device), layers=self._hand_out(recipe, device))
            pages = ranks.pages
            assert pages is not None
            group = group_of(ranks.sums, pages.meeting, ranks.folder, 0, size, ranks.step_s, ranks.lost.done, device)
            for line in ranks.lines:
                line.record()  # it has found the others
        except (OSError, EOFError, RuntimeError, Parted) as e:
            raise ranks.gone(e) from e
        if recipe.head.weight is not recipe.embedding:
            recipe.head.let_go()
        if ranks.sums != "nccl":
            ranks.remove_folder()
        self._whole = replace(own, layers=())
        self._meeting = Meeting(
            group, len(recipe.layers), recipe.hidden, width, recipe.dtype, device=device, apart=keeping.apart
        )
        heads = Share(0, size).kv_heads(recipe.kv_heads)
        self._part = part_of(own, keeping, 0, memory.layout, pages.bytes, heads, self._meeting)
        self.view: HostView | None = None if self._part.view is None else RanksView(self._part.view, ranks)

    def _introduce(self, recipe: Recipe, memory: PageTensor, threads: int, width: int) -> None:
        pages = self._ranks.pages
        assert pages is not None
        size = self._ranks.count + 1
        for rank, line in enumerate(self._ranks.lines, start=1):
            share = Share(rank, size)
            heads = share.kv_heads(recipe.kv_heads)
            start = Start(
                rank=rank,
                ranks=size,
                folder=str(self._ranks.folder or ""),
                threads=threads,
                layout=asdict(memory.layout),
                pages=memory.pages,
                layers=len(recipe.layers),
                kv_heads=(heads.start, heads.stop),
                columns=width,
                sums=self._ranks.sums,
                timeout_s=self._ranks.step_s,
                keeping=asdict(self._ranks.keeping),
            )
            line.send_record(asdict(start))
            line.send_fd(pages.fd)
            if self._ranks.keeping.apart:
                self._ranks.open_moves(line)
            line.send_part(shared(recipe, share, ()))

    def _hand_out(self, recipe: Recipe, device: torch.device) -> tuple[Layer, ...]:
        """Rank 0's own, on ``device``."""
        own = []
        for layer in recipe.layers:
            for rank, line in enumerate(self._ranks.lines, start=1):
                line.send_part(shared_layer(recipe, layer, Share(rank, self._ranks.count + 1)))
            own.append(placed(shared_layer(recipe, layer, Share(0, self._ranks.count + 1)), device))
            let_go(layer)
        return tuple(own)

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        """PeerSilent where another rank is gone, then and in every later step; TransferFailed where one could not compute."""
        self._ranks.require()
        x = self._part.embedded(ids)
        if before_layer is not None:
            before_layer(0)
        apart = self.view is not None
        step = Step(tuple(spans), tuple(wanted), x, apart and before_layer is not None, apart and on_layer is not None)
        self._tell(step)
        self._meeting.begin(len(x), len(wanted), before_layer, on_layer, sends=step.sends)
        try:
            x = self._part.through_layers(x, step)
            if not wanted:
                return x.new_empty((0, self._whole.vocabulary))
            gathered = self._meeting.gather(self._part.logits(x, wanted))
        except Stopped as e:
            raise TransferFailed("another rank of this worker could not compute its part of the step; its log says why") from e
        except Parted as e:
            raise self._ranks.gone(e) from e
        except BaseException:
            self._leave()
            raise
        assert gathered is not None  # this is rank 0
        return self._whole.capped(gathered[:, : self._whole.vocabulary])

    def close(self) -> None:
        self._ranks.close()
        self._part.close()
        del self._part, self._meeting, self._whole

    def _leave(self) -> None:
        """With all ranks; what is raised here already says more than that one of them is gone, too."""
        try:
            self._meeting.leave()
        except Parted as e:
            self._ranks.gone(e)

    def _tell(self, step: Step) -> None:
        try:
            for line in self._ranks.lines:
                line.send_step(step)
        except OSError as e:
            raise self._ranks.gone(e) from e
