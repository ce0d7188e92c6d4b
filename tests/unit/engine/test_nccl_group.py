"""Sums between GPUs, with a group in NCCL's place: who waits, and how a rank that is gone ends the wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from moonpool.engine.page_tensor import CPU
from moonpool.engine.recipe import Experts, Projection
from moonpool.engine.tensor_parallel.groups import NcclGroup
from moonpool.engine.tensor_parallel.keeping import placed
from moonpool.engine.tensor_parallel.meeting import Parted


class Work:
    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        assert self.looks < 0
        self.waited = True


class Group:
    """Of two ranks that have the same."""

    looks = 0

    class Options:
        pass

    def __init__(self, store: object, rank: int, ranks: int, options: object) -> None:
        self.rank = rank

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        tensors[0].mul_(2)
        return Work(self.looks)

    def gather(self, into: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Work:
        assert (len(into), options.rootRank) == (self.rank == 0, 0)
        for one in into[0] if into else ():
            one.copy_(tensors[0])
        return Work(self.looks)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(Group, "looks", 0)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    return Group


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_and_logits_are_there_when_the_call_returns(tmp_path: Path, stood_in: type[Group], rank: int) -> None:
    group = NcclGroup(tmp_path, rank, 2, 10.0, lambda: False, CPU)
    stood_in.looks = 5
    flat = torch.ones(3)
    group.sum(flat)
    assert flat.tolist() == [2.0] * 3
    assert [one.tolist() for one in group.gather(flat)] == ([[2.0] * 3] * 2 if rank == 0 else [])


def test_a_rank_that_is_gone_or_does_not_come_ends_the_wait(tmp_path: Path, stood_in: type[Group]) -> None:
    gone = [False]
    group = NcclGroup(tmp_path, 0, 2, 0.01, lambda: gone[0], CPU)
    stood_in.looks = 1 << 30
    with pytest.raises(Parted, match="did not come within"):
        group.sum(torch.ones(1))
    gone[0] = True
    for meet in (group.sum, group.gather):
        with pytest.raises(Parted, match="another rank has ended"):
            meet(torch.ones(1))


def test_every_tensor_of_a_part_is_where_its_rank_computes() -> None:
    part = Experts(torch.ones(2, 4), 1, True, torch.ones(2, 6, 4), torch.ones(2, 4, 3), Projection(torch.ones(1, 4)))
    there = placed(part, torch.device("meta"))
    assert {one.device.type for one in (there.router, there.gate_up, there.down)} == {"meta"}
    assert there.dense_gate is not None and there.dense_gate.weight.device.type == "meta"
    assert (there.top_k, there.normalised, there.dense_gate.bias, there.down.shape) == (1, True, None, part.down.shape)
    assert placed(part, CPU) is part
