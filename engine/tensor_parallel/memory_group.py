"""Ranks of one host that add up in memory they all map: microseconds where sockets and their threads take a millisecond.

A tensor goes piece by piece. A rank writes its piece into a place of its own, counts its word up, waits until the words of all
say that they came so far, and reads all places in the order of ranks: so every rank gets the same bits. Places of two pieces
take turns: who writes the one after the next knows that all have read this one, since they came to the next.

A rank that waits spins for a fraction of a millisecond, longer than ranks are apart where each has a core; then it sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moonpool.engine.tensor_parallel.awaiting import LINE_WORDS, waits
from moonpool.engine.tensor_parallel.meeting import Parted

PIECE_BYTES = 256 << 10  # stays in a core's cache between two ranks
_SPINS = 20_000  # some 0.3 ms of pauses
_SLEEP_S = 200e-6


def group_bytes(ranks: int) -> int:
    """Of the memory that ``ranks`` meet in; zeros at first."""
    return 8 * LINE_WORDS * ranks + 2 * ranks * PIECE_BYTES


class MemoryGroup:
    def __init__(self, memory: torch.Tensor, rank: int, ranks: int, timeout_s: float, parted: Callable[[], bool]) -> None:
        """``memory``: uint8 [``group_bytes``], mapped by all. ``parted``: whether another rank is known to be gone."""
        self._rank, self._ranks, self._timeout_s, self._parted = rank, ranks, timeout_s, parted
        self._memory, self._waits = memory, waits()
        self._words = memory.data_ptr()
        self._own_word = self._words + 8 * LINE_WORDS * rank
        self._places = memory[8 * LINE_WORDS * ranks :].view(2, ranks, PIECE_BYTES)

    def sum(self, flat: torch.Tensor) -> None:
        size = PIECE_BYTES // flat.element_size()
        for start in range(0, len(flat), size):
            piece = flat[start : start + size]
            places = self._exchanged(piece)
            if self._ranks == 2:
                torch.add(places[0], places[1], out=piece)
            else:
                piece.copy_(places.sum(0, dtype=torch.float32))

    def gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(flat) for _ in range(self._ranks)] if self._rank == 0 else []
        size = PIECE_BYTES // flat.element_size()
        for start in range(0, len(flat), size):
            piece = flat[start : start + size]
            places = self._exchanged(piece)
            for whole, place in zip(found, places, strict=False):
                whole[start : start + len(piece)] = place
        return found

    def _exchanged(self, piece: torch.Tensor) -> torch.Tensor:
        """[ranks, len(piece)]: everybody's. Valid until the meeting after the next."""
        turn = self._arrived() & 1
        places = self._places[turn].view(piece.dtype)[:, : len(piece)]
        places[self._rank].copy_(piece)
        self._wait(self._waits.step_up(self._own_word))
        return places

    def _arrived(self) -> int:
        """How often this rank has met the others."""
        return int(self._memory[: 8 * LINE_WORDS * self._ranks].view(torch.int64)[LINE_WORDS * self._rank])

    def _wait(self, meeting: int) -> None:
        if self._waits.all_at(self._words, self._ranks, meeting, _SPINS):
            return
        until = time.monotonic() + self._timeout_s
        while not self._waits.all_at(self._words, self._ranks, meeting, 1):
            if self._parted():
                raise Parted("another rank has ended")
            if time.monotonic() > until:
                raise Parted(f"another rank did not come within {self._timeout_s:.0f} s")
            time.sleep(_SLEEP_S)
