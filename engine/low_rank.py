"""What adapters add to linear layers: products of low rank, each for the rows of a step that name its adapter.

LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1): a linear layer gives W x + s B A x, with
A [rank, inputs] and B [outputs, rank]. Here ``down`` is A and ``up`` is s B, so the sum is never merged into W, and rows of
many adapters and of none share one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from moonpool.engine.backends import Backend, Hook, Span


@dataclass(frozen=True, slots=True)
class LowRank:
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], scaled


@dataclass(slots=True)
class Groups:
    """Which tokens of the step at hand go through which adapter; None: all of them."""

    of: list[tuple[str, torch.Tensor | None]] = field(default_factory=list)

    def begin(self, spans: Sequence[Span], device: torch.device) -> None:
        names = {span.adapter for span in spans}
        if len(names) == 1:
            self.of = [(name, None) for name in names if name]
            return
        tokens = {name: [range(s.first, s.first + s.count) for s in spans if s.adapter == name] for name in names if name}
        self.of = [(name, torch.from_numpy(np.concatenate(at)).to(device)) for name, at in tokens.items()]


class LowRanks:
    """What every adapter adds to one linear layer."""

    def __init__(self, groups: Groups, of: Mapping[str, LowRank]) -> None:
        self._groups, self._of = groups, of

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """``to`` [tokens, outputs], in place, for inputs ``x`` [tokens, inputs] of the step at hand."""
        for name, at in self._groups.of:
            pair = self._of.get(name)
            if pair is None:
                continue
            if at is None:
                to += functional.linear(functional.linear(x, pair.down), pair.up)
            else:
                to.index_add_(0, at, functional.linear(functional.linear(x[at], pair.down), pair.up))
        return to


class Adapters:
    """All adapters of one model, by digest, and the step they compute in; for one thread at a time."""

    def __init__(self, digests: frozenset[str], of: Mapping[torch.nn.Module, Mapping[str, LowRank]]) -> None:
        self.digests = digests
        self.groups = Groups()
        self._of = of

    def merged(self, parts: Sequence[torch.nn.Linear]) -> LowRanks | None:
        """For one projection that computes what ``parts`` did, their outputs one after another; None: no adapter adds to it."""
        names = sorted({name for part in parts for name in self._of.get(part, {})})
        return LowRanks(self.groups, {name: self._stacked(parts, name) for name in names}) if names else None

    def _stacked(self, parts: Sequence[torch.nn.Linear], name: str) -> LowRank:
        pairs = [self._of.get(part, {}).get(name) for part in parts]
        down = torch.cat([pair.down for pair in pairs if pair is not None])
        up = down.new_zeros((sum(part.out_features for part in parts), len(down)))
        row = column = 0
        for part, pair in zip(parts, pairs, strict=True):
            if pair is not None:
                rank = len(pair.down)
                up[row : row + part.out_features, column : column + rank] = pair.up
                column += rank
            row += part.out_features
        return LowRank(down, up)

    def hook(self) -> None:
        """Let the modules themselves add what their adapters say."""
        for module in self._of:
            module.register_forward_hook(_hook(LowRanks(self.groups, self._of[module])))


def _hook(ranks: LowRanks) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    def added(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        whole = ranks.add(inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1]))
        return whole.view(output.shape)

    return added


class AdaptedBackend:
    """``inner``, whose linears add what ``adapters`` say."""

    def __init__(self, inner: Backend, adapters: Adapters, device: torch.device) -> None:
        self.name = inner.name
        self._inner, self._adapters, self._device = inner, adapters, device

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        self._adapters.groups.begin(spans, self._device)
        return self._inner.forward(ids, spans, wanted, before_layer, on_layer)

    def close(self) -> None:
        self._inner.close()
