"""How the ranks of one worker add up: in memory that they share, by gloo over loopback, or by nccl between GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from moonpool.engine.tensor_parallel.line import Sums
from moonpool.engine.tensor_parallel.meeting import Group, Parted
from moonpool.engine.tensor_parallel.memory_group import MemoryGroup

_SPIN_S = 300e-6
_SLEEP_S = 100e-6


def group_of(
    sums: Sums,
    memory: torch.Tensor,
    folder: Path | None,
    rank: int,
    ranks: int,
    timeout_s: float,
    parted: Callable[[], bool],
    device: torch.device,
) -> Group:
    """``memory``: to meet in; ``folder``: where ranks find one another for gloo and nccl. Returns once all are there (these
    two). ``device``: of the tensors. ``parted``: whether another rank is known to be gone."""
    if sums == "memory":
        return MemoryGroup(memory, rank, ranks, timeout_s, parted)
    assert folder is not None
    if sums == "gloo":
        return GlooGroup(folder, rank, ranks, timeout_s)
    return NcclGroup(folder, rank, ranks, timeout_s, parted, device)


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


class NcclGroup:
    """Between GPUs, each rank with the one that its thread computes on. The thread waits on the host for every sum: a rank that
    waited on its device alone could not tell whether another one is gone."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, timeout_s: float, parted: Callable[[], bool], device: torch.device
    ) -> None:
        """It may read ``folder`` as long as it lives. NCCL's own timeout, twice as long, would end the whole process."""
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # by which they find one another; all are on this host
        torchs: Any = distributed
        self._rank, self._ranks, self._timeout_s, self._parted = rank, ranks, timeout_s, parted
        options = torchs.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=2 * timeout_s)
        self._group = torchs.ProcessGroupNCCL(torchs.FileStore(str(folder / "ranks"), ranks), rank, ranks, options)
        self._to_first = torchs.GatherOptions()
        self._to_first.rootRank = 0
        self.sum(torch.zeros(1, device=device))  # now they find one another

    def sum(self, flat: torch.Tensor) -> None:
        try:
            self._wait(self._group.allreduce([flat]))
        except RuntimeError as e:
            raise Parted(str(e)) from e

    def gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(flat) for _ in range(self._ranks)] if self._rank == 0 else []
        try:
            self._wait(self._group.gather([found] if found else [], [flat], self._to_first))
        except RuntimeError as e:
            raise Parted(str(e)) from e
        return found

    def _wait(self, work: Any) -> None:
        begun = time.monotonic()
        while not work.is_completed():
            if self._parted():
                raise Parted("another rank has ended")
            waited = time.monotonic() - begun
            if waited > self._timeout_s:
                raise Parted(f"another rank did not come within {self._timeout_s:.0f} s")
            if waited > _SPIN_S:
                time.sleep(_SLEEP_S)
        work.wait()
