"""Where the ranks of one worker meet within a step: sums after attention and MLP of every layer, then logits come together.

Every rank joins the same meetings in the same order, whatever happens to it: what is exchanged has one more number than the
tensor, not zero at a rank that cannot go on. Then all of them leave the step after that meeting, and are ready for the next.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moonpool.engine.backends import Hook


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

    def __init__(self, group: Group, layers: int, hidden: int, columns: int, dtype: torch.dtype) -> None:
        """``columns``: logits of one token that each rank computes."""
        self._group, self._layers = group, layers
        self._hidden, self._columns, self._dtype = hidden, columns, dtype
        self._done = self._tokens = self._wanted = 0
        self._open = False
        self._before_layer: Hook | None = None
        self._on_layer: Hook | None = None

    def begin(self, tokens: int, wanted: int, before_layer: Hook | None = None, on_layer: Hook | None = None) -> None:
        """``on_layer(l)`` runs once all ranks have written K/V of layer l, ``before_layer(l)`` of the second layer on before
        any of them can touch pages of layer l."""
        self._tokens, self._wanted = tokens, wanted
        self._before_layer, self._on_layer = before_layer, on_layer
        self._done, self._open = 0, True

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of all ranks together. ``Stopped``, or what a hook raises."""
        layer, after_mlp = divmod(self._done, 2)
        if after_mlp and layer + 1 < self._layers and self._before_layer is not None:
            self._before_layer(layer + 1)
        flat = _with_flag(share)
        self._join_sum(flat)
        if not after_mlp and self._on_layer is not None:
            self._on_layer(layer)
        return flat[:-1].view(share.shape)

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
        if self._done < 2 * self._layers:
            self._group.sum(self._flag_alone(self._tokens * self._hidden))
        elif self._wanted:
            self._group.gather(self._flag_alone(self._wanted * self._columns))

    def _join_sum(self, flat: torch.Tensor) -> None:
        self._group.sum(flat)
        self._done += 1
        if flat[-1].item():
            self._open = False
            raise Stopped
        if self._done == 2 * self._layers and not self._wanted:
            self._open = False

    def _flag_alone(self, size: int) -> torch.Tensor:
        flat = torch.zeros(size + 1, dtype=self._dtype)
        flat[-1] = 1.0
        return flat


def _with_flag(share: torch.Tensor) -> torch.Tensor:
    flat = share.new_empty(share.numel() + 1)
    flat[:-1].copy_(share.reshape(-1))
    flat[-1] = 0.0
    return flat
