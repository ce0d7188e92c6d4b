"""Layer slices out of pages of any dtype into canonical bytes, and back: the reference of the kernels in ``engine.triton``.

The canonical order is that of ``core.layout``; quantised pages keep the same rows, with an exponent each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.quantised import dequantise, quantise


class Packing(Protocol):
    def pack(self, pages: Sequence[int], layer: int, valid: Sequence[int]) -> torch.Tensor:
        """uint8 [pages, slice_bytes]: ``layer`` of each page, zero from its ``valid`` tokens on."""

    def unpack(self, pages: Sequence[int], layer: int, data: torch.Tensor) -> None:
        """The inverse, of whole slices. ``data``: uint8 [pages, slice_bytes], on the pages' device."""


class TorchPacking:
    """With PyTorch's operations, on any device."""

    def __init__(self, memory: PageTensor) -> None:
        layout = memory.layout
        self._memory = memory
        self._dtype = getattr(torch, layout.dtype)
        self._slice = (layout.planes, layout.block_tokens, layout.head_dim)
        self._values = memory.tensor.view(memory.pages, layout.layers, *self._slice)
        self._exponents = (
            None if memory.exponents is None else memory.exponents.view(memory.pages, layout.layers, *self._slice[:2])
        )

    def pack(self, pages: Sequence[int], layer: int, valid: Sequence[int]) -> torch.Tensor:
        out = torch.zeros((len(pages), *self._slice), dtype=self._dtype, device=self._memory.device)
        for into, page, count in zip(out, pages, valid, strict=True):
            values = self._values[page, layer, :, :count]
            if self._exponents is None:
                into[:, :count] = values
            else:
                into[:, :count] = dequantise(values, self._exponents[page, layer, :, :count]).to(self._dtype)
        return out.view(torch.uint8).view(len(pages), -1)

    def unpack(self, pages: Sequence[int], layer: int, data: torch.Tensor) -> None:
        for one, page in zip(data.view(self._dtype).view(-1, *self._slice), pages, strict=True):
            if self._exponents is None:
                self._values[page, layer] = one
            else:
                self._values[page, layer], self._exponents[page, layer] = quantise(one, self._memory.kept)
