"""How the ranks of one worker add up: in memory that they share, or by gloo over loopback."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from moonpool.engine.tensor_parallel.line import Sums
from moonpool.engine.tensor_parallel.meeting import Group, Parted
from moonpool.engine.tensor_parallel.memory_group import MemoryGroup


def group_of(
    sums: Sums, memory: torch.Tensor, folder: Path | None, rank: int, ranks: int, timeout_s: float, parted: Callable[[], bool]
) -> Group:
    """``memory``: to meet in; ``folder``: where ranks find one another for gloo. Returns once all are there (gloo)."""
    if sums == "memory":
        return MemoryGroup(memory, rank, ranks, timeout_s, parted)
    assert folder is not None
    return GlooGroup(folder, rank, ranks, timeout_s)


class GlooGroup:
    """Over loopback; ranks find one another by a file in ``folder``, which may be removed once all have this."""

    def __init__(self, folder: Path, rank: int, ranks: int, timeout_s: float) -> None:
        torchs: Any = distributed  # it exports by other means than its types know
        gloo = torchs.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        self._rank, self._ranks = rank, ranks
        self._group = gloo(torchs.FileStore(str(folder / "ranks"), ranks), rank, ranks, options)
        self._to_first = torchs.GatherOptions()
        self._to_first.rootRank = 0

    def sum(self, flat: torch.Tensor) -> None:
        try:
            self._group.allreduce([flat]).wait()
        except RuntimeError as e:
            raise Parted(str(e)) from e

    def gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(flat) for _ in range(self._ranks)] if self._rank == 0 else []
        try:
            self._group.gather([found] if found else [], [flat], self._to_first).wait()
        except RuntimeError as e:
            raise Parted(str(e)) from e
        return found
