"""Ranks that add up in memory they share: any sizes, the same bits for all, and one that never comes."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.tensor_parallel.meeting import Parted
from moonpool.engine.tensor_parallel.memory_group import PIECE_BYTES, MemoryGroup, group_bytes


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from([1, 577, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES + 7]), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_get_the_same_sum_and_the_first_everybodys_part(ranks: int, sizes: list[int], dtype: torch.dtype) -> None:
    memory = torch.zeros(group_bytes(ranks), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(1)
    given = [[torch.randn(size, generator=draw).to(dtype) for size in sizes] for _ in range(ranks)]
    sums: dict[int, list[torch.Tensor]] = {}
    gathered: dict[int, list[list[torch.Tensor]]] = {}

    def meet(rank: int) -> None:
        group = MemoryGroup(memory, rank, ranks, 20.0, lambda: False)
        mine = [one.clone() for one in given[rank]]
        for one in mine:
            group.sum(one)
        sums[rank] = mine
        gathered[rank] = [group.gather(one) for one in given[rank]]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for at in range(len(sizes)):
        want = torch.stack([given[rank][at] for rank in range(ranks)]).float().sum(0).to(dtype)
        assert all(torch.equal(sums[rank][at], sums[0][at]) for rank in range(ranks))
        torch.testing.assert_close(sums[0][at], want)
        assert all(torch.equal(gathered[0][at][rank], given[rank][at]) for rank in range(ranks))
        assert not any(gathered[rank][at] for rank in range(1, ranks))


def test_who_waits_for_a_rank_that_is_gone_or_stands_still_is_told() -> None:
    memory = torch.zeros(group_bytes(2), dtype=torch.uint8)
    with pytest.raises(Parted, match="has ended"):
        MemoryGroup(memory, 0, 2, 20.0, lambda: True).sum(torch.ones(3))
    memory.zero_()
    with pytest.raises(Parted, match="did not come"):
        MemoryGroup(memory, 0, 2, 0.01, lambda: False).sum(torch.ones(3))
