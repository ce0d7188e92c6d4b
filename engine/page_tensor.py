"""The device pages of one engine as a tensor, and where in it tokens and pages lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import MLA, KVLayout
from moonpool.engine.backends import Span


class PageTensor:
    """``[pages, layers, 2, kv_heads, block_tokens, head_dim]``; of latents ``[pages, layers, block_tokens, head_dim]``.

    ``kv_heads`` and ``own``: how many heads are read and written through this one, and where they lie in ``tensor``.
    """

    def __init__(
        self, layout: KVLayout, pages: int, *, memory: torch.Tensor | None = None, heads: range | None = None
    ) -> None:
        """``memory``: bytes that others map, too; None: of this process alone, zero. ``heads``: those of one of several ranks
        that keep K/V in the same pages; None: all of them."""
        self.layout = layout
        self.pages = pages
        planes = () if layout.kind == MLA else (2, layout.kv_heads)
        shape = (pages, layout.layers, *planes, layout.block_tokens, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        self.tensor = torch.zeros(shape, dtype=dtype) if memory is None else memory.view(dtype).view(shape)
        self.rows = self.tensor.view(-1, layout.head_dim)  # one token of one plane
        self.planes = self.tensor.view(-1, layout.block_tokens * layout.head_dim)  # K or V of one head, or latents, of one page
        ids = torch.arange(layout.planes)
        self.plane_ids = ids if heads is None else ids.view(2, -1)[:, heads.start : heads.stop].reshape(-1)
        self.own = self.tensor if heads is None else self.tensor[:, :, :, heads.start : heads.stop]
        self.kv_heads = layout.kv_heads if heads is None else len(heads)
        self.page_planes = layout.layers * layout.planes

    def slot_rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """int64 [planes * tokens]: where what layer 0 keeps of all tokens goes, in ``rows``, planes before tokens."""
        size = self.layout.block_tokens
        places = []
        for span in spans:
            at = np.arange(span.start, span.end)
            places.append(span.table[at // size] * (self.page_planes * size) + at % size)
        tokens = torch.from_numpy(np.concatenate(places))
        return (self.plane_ids[:, None] * size + tokens).view(-1)

    def page_index(self, table: NDArray[np.int64]) -> torch.Tensor:
        """int64 [planes * pages]: the planes of layer 0 of the pages in ``table``, for ``gather``."""
        return (self.plane_ids[:, None] + torch.from_numpy(table) * self.page_planes).view(-1)

    def gather(self, index: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [kv_heads, pages * block_tokens, head_dim] each, copies. Latents are both, in one tensor."""
        layout = self.layout
        planes = self.planes.index_select(0, index + layer * layout.planes)
        kv = planes.view(-1, self.kv_heads, len(index) // len(self.plane_ids) * layout.block_tokens, layout.head_dim)
        return kv[0], kv[-1]
