"""Where the ranks of one worker meet within a step: sums after attention and MLP of every layer, then logits come together.

Every rank joins the same meetings in the same order, whatever happens to it: what is exchanged has one more number than the
tensor, not zero at a rank that cannot go on. Then all of them leave the step after that meeting, and are ready for the next.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moonpool.engine.backends import Hook
from moonpool.engine.page_tensor import CPU


class Stopped(Exception):
    """Some other rank could not go on with this step."""


class Parted(Exception):
    """Another rank is gone, or did not come for too long: there is no further step."""


class Group(Protocol):
    """``Parted`` comes out of both."""

    def sum(self, flat: torch.Tensor) -> None:
        """In place, the same bits at every rank."""

    def gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One of each rank at rank 0, nothing at the others."""


class Meeting:
    """One rank's side, for one step after another."""

    def __init__(
        self,
        group: Group,
        layers: int,
        hidden: int,
        columns: int,
        dtype: torch.dtype,
        *,
        device: torch.device = CPU,
        apart: bool = False,
    ) -> None:
        """``columns``: logits of one token that each rank computes. ``device``: of what is summed. ``apart``: each rank keeps
        pages of its own."""
        self._group, self._layers, self._apart = group, layers, apart
        self._hidden, self._columns, self._dtype, self._device = hidden, columns, dtype, device
        self._done = self._sums = self._tokens = self._wanted = 0
        self._open = self._late = False
        self._before_layer: Hook | None = None
        self._on_layer: Hook | None = None

    def begin(
        self,
        tokens: int,
        wanted: int,
        before_layer: Hook | None = None,
        on_layer: Hook | None = None,
        *,
        sends: bool = False,
    ) -> None:
        """``on_layer(l)`` runs once all ranks have written K/V of layer l, ``before_layer(l)`` of the second layer on before
        any of them can touch pages of layer l.

        ``sends``: a rank that comes to the sum behind attention of layer l has layer l - 1 in the host's view, and all layers
        when it comes to ``end_layers``. So ``on_layer`` runs one layer late.
        """
        self._tokens, self._wanted = tokens, wanted
        self._before_layer, self._on_layer = before_layer, on_layer
        self._late = sends
        self._sums = 2 * self._layers + (1 if self._apart and (sends or not wanted) else 0)
        self._done, self._open = 0, True

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of all ranks together. ``Stopped``, or what a hook raises."""
        layer, after_mlp = divmod(self._done, 2)
        if after_mlp and layer + 1 < self._layers and self._before_layer is not None:
            self._before_layer(layer + 1)
        flat = _with_flag(share)
        self._join_sum(flat)
        if not after_mlp:
            self._tell(layer - 1 if self._late else layer)
        return flat[:-1].view(share.shape)

    def end_layers(self) -> None:
        """Where ranks keep pages apart and no logits follow, or a step sends: all have done with it what they do after the last
        layer. ``Stopped``, or what a hook raises."""
        if self._done < self._sums:
            self._join_sum(self._flag(0, 0.0))
        if self._late:
            self._tell(self._layers - 1)

    def _tell(self, layer: int) -> None:
        if layer >= 0 and self._on_layer is not None:
            self._on_layer(layer)

    def gather(self, share: torch.Tensor) -> torch.Tensor | None:
        """[wanted, columns] of each rank to [wanted, ranks * columns] at rank 0; None at others."""
        self._open = False
        found = self._group.gather(_with_flag(share))
        if not found:
            return None
        if any(one[-1].item() for one in found):
            raise Stopped
        return torch.cat([one[:-1].view(share.shape) for one in found], dim=1)

    def leave(self) -> None:
        """This rank cannot go on: all of them end the step at their next meeting. Nothing where the step is over anyway."""
        if not self._open:
            return
        self._open = False
        if self._done < self._sums:
            self._group.sum(self._flag(self._tokens * self._hidden if self._done < 2 * self._layers else 0, 1.0))
        elif self._wanted:
            self._group.gather(self._flag(self._wanted * self._columns, 1.0))

    def _join_sum(self, flat: torch.Tensor) -> None:
        self._group.sum(flat)
        self._done += 1
        if flat[-1].item():
            self._open = False
            raise Stopped
        if self._done == self._sums and not self._wanted:
            self._open = False

    def _flag(self, size: int, value: float) -> torch.Tensor:
        """Behind ``size`` zeros."""
        flat = torch.zeros(size + 1, dtype=self._dtype, device=self._device)
        flat[-1] = value
        return flat


def _with_flag(share: torch.Tensor) -> torch.Tensor:
    flat = share.new_empty(share.numel() + 1)
    flat[:-1].copy_(share.reshape(-1))
    flat[-1] = 0.0
    return flat
