"""What turns a batch of tokens into logits. One engine has one; all of them keep K/V in the same canonical pages.

========  ==========================================================================================================
compiled  a whole-model step for CPUs with AVX-512 bf16 (``engine.compiled``): models with a ``Recipe``, bfloat16
fused     the same recipe with PyTorch's kernels: any CPU, any dtype
torch     the model as its library wrote it: whatever the engine accepts, and the reference for the other two
========  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Hook = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: ``count`` tokens from position ``start`` on, at ``first ..`` of the flattened batch."""

    first: int
    count: int
    start: int
    table: NDArray[np.int64]  # pages of the positions 0 .. start + count - 1
    adapter: str = ""  # digest of the one whose weights are added; empty: the model alone

    @property
    def end(self) -> int:
        return self.start + self.count


class Backend(Protocol):
    """Owned by one engine; for one thread at a time."""

    name: str

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        """[len(wanted), vocabulary] in any float dtype: the logits of the tokens ``wanted`` of the flattened batch ``ids``.

        ``before_layer(l)`` runs before layer l touches pages; ``on_layer(l)`` once K/V of layer l of all rows are in
        pages. What a hook raises comes out of here. The result may be overwritten by the next call.
        """

    def close(self) -> None:
        """Let go of weights, page memory and threads."""
