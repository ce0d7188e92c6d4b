"""The device pages of one engine as a tensor, and where in it tokens and pages lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.engine.backends import Span


class PageTensor:
    """``[pages, layers, 2, kv_heads, block_tokens, head_dim]``."""

    def __init__(self, layout: KVLayout, pages: int) -> None:
        self.layout = layout
        self.pages = pages
        shape = (pages, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        self.tensor = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
        self.rows = self.tensor.view(-1, layout.head_dim)  # one token of one head
        self.planes = self.tensor.view(-1, layout.block_tokens * layout.head_dim)  # K or V of one head of one page
        self.plane_ids = torch.arange(2 * layout.kv_heads)
        self.page_planes = layout.layers * 2 * layout.kv_heads

    def slot_rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """int64 [2 * kv_heads * tokens]: where layer 0's K and V of all tokens go, in ``rows``, heads before tokens."""
        size = self.layout.block_tokens
        places = []
        for span in spans:
            at = np.arange(span.start, span.end)
            places.append(span.table[at // size] * (self.page_planes * size) + at % size)
        tokens = torch.from_numpy(np.concatenate(places))
        return (self.plane_ids[:, None] * size + tokens).view(-1)

    def page_index(self, table: NDArray[np.int64]) -> torch.Tensor:
        """int64 [2 * kv_heads * pages]: the planes of layer 0 of the pages in ``table``, for ``gather``."""
        return (self.plane_ids[:, None] + torch.from_numpy(table) * self.page_planes).view(-1)

    def gather(self, index: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [kv_heads, pages * block_tokens, head_dim] each, copies."""
        heads = self.layout.kv_heads
        kv = self.planes.index_select(0, index + layer * 2 * heads).view(2, heads, -1, self.layout.head_dim)
        return kv[0], kv[1]
