"""The device pages of one engine as a tensor, and where in it tokens and pages lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import MLA, KVLayout
from moonpool.engine.backends import Span
from moonpool.engine.quantised import STORED, Kept

CPU = torch.device("cpu")


def sent(host: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``host`` as a tensor of ``device``, which nobody waits for: it goes through page-locked memory, which PyTorch gives to
    nobody else before the copy has ended."""
    there = torch.from_numpy(host)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


class PageTensor:
    """``[pages, layers, 2, kv_heads, block_tokens, head_dim]``; of latents ``[pages, layers, block_tokens, head_dim]``.

    ``kv_heads`` and ``own``: how many heads are read and written through this one, and where they lie in ``tensor``. Pages
    that are ``kept`` in eight bits (``engine.quantised``) have ``exponents``, uint8, one for each row.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        *,
        memory: torch.Tensor | None = None,
        heads: range | None = None,
        device: torch.device = CPU,
        kept: Kept = "auto",
    ) -> None:
        """``memory``: bytes that others map, too; None: of this process alone, zero. ``heads``: those of one of several ranks
        that keep K/V in the same pages; None: all of them."""
        self.layout = layout
        self.pages = pages
        self.device = device
        self.kept = kept
        planes = () if layout.kind == MLA else (2, layout.kv_heads)
        shape = (pages, layout.layers, *planes, layout.block_tokens, layout.head_dim)
        dtype = getattr(torch, layout.dtype) if kept == "auto" else STORED[kept]
        self.tensor = torch.zeros(shape, dtype=dtype, device=device) if memory is None else memory.view(dtype).view(shape)
        self.exponents = None if kept == "auto" else torch.zeros(shape[:-1], dtype=torch.uint8, device=device)
        self.rows = self.tensor.view(-1, layout.head_dim)  # one token of one plane
        self.planes = self.tensor.view(-1, layout.block_tokens * layout.head_dim)  # K or V of one head, or latents, of one page
        ids = torch.arange(layout.planes, device=device)
        self.plane_ids = ids if heads is None else ids.view(2, -1)[:, heads.start : heads.stop].reshape(-1)
        self.own = self.tensor if heads is None else self.tensor[:, :, :, heads.start : heads.stop]
        self.first_plane = 0 if heads is None else heads.start
        self.kv_heads = layout.kv_heads if heads is None else len(heads)
        self.page_planes = layout.layers * layout.planes

    def copy_page(self, source: int, target: int) -> None:
        for part in self._parts():
            part[target] = part[source]

    def fill(self, pages: Sequence[int], byte: int) -> None:
        """Every byte of ``pages``. Page by page: an index would have to come to the device first, which waits for it."""
        for part in self._parts():
            for page in pages:
                part[page].fill_(byte)

    def _parts(self) -> list[torch.Tensor]:
        """uint8 [pages, bytes] each."""
        values = self.tensor.view(self.pages, -1).view(torch.uint8)
        return [values] if self.exponents is None else [values, self.exponents.view(self.pages, -1)]

    def slot_rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """int64 [planes * tokens]: where what layer 0 keeps of all tokens goes, in ``rows``, planes before tokens."""
        size = self.layout.block_tokens
        places = []
        for span in spans:
            at = np.arange(span.start, span.end)
            places.append(span.table[at // size] * (self.page_planes * size) + at % size)
        tokens = sent(np.concatenate(places), self.device)
        return (self.plane_ids[:, None] * size + tokens).view(-1)

    def page_index(self, table: NDArray[np.int64]) -> torch.Tensor:
        """int64 [planes * pages]: the planes of layer 0 of the pages in ``table``, for ``gather``."""
        return (self.plane_ids[:, None] + sent(table, self.device) * self.page_planes).view(-1)

    def gather(self, index: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [kv_heads, pages * block_tokens, head_dim] each, copies. Latents are both, in one tensor."""
        layout = self.layout
        planes = self.planes.index_select(0, index + layer * layout.planes)
        kv = planes.view(-1, self.kv_heads, len(index) // len(self.plane_ids) * layout.block_tokens, layout.head_dim)
        return kv[0], kv[-1]
