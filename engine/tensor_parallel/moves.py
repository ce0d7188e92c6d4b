"""K/V between the host's view and pages that each rank keeps of its own heads: what rank 0 does there, all do.

Slices come in while a step is computed, so this has a line and a thread of its own at every rank. Rank 0 waits until all have
answered: then each has noted it, and nothing that rank 0 does after it, in a step or around one, finds a rank that has not.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.device_memory import DeviceMemory
from moonpool.core.errors import Bug, MoonpoolError, PeerSilent, TransferFailed
from moonpool.engine.backends import Hook, Span
from moonpool.engine.host_view import Hooks, StagedView
from moonpool.engine.tensor_parallel.keeping import enter
from moonpool.engine.tensor_parallel.line import Line
from moonpool.engine.tensor_parallel.ranks import Ranks

_MOST_PAGES = 100_000  # of one record


@dataclass(frozen=True, slots=True)
class Move:
    what: Literal["came_in", "landed", "gone_out", "copy_page", "fill"]
    number: int  # the layer, the page to copy, or the byte
    pages: Sequence[int]

    def on(self, view: StagedView) -> None:
        if self.what == "came_in":
            view.came_in(self.number, self.pages)
        elif self.what == "landed":
            view.landed(self.number)
        elif self.what == "gone_out":
            view.gone_out(self.pages)
        elif self.what == "copy_page":
            view.copy_page(self.number, self.pages[0])
        elif self.what == "fill":
            view.fill(self.pages, self.number)
        else:
            raise Bug(f"a move was expected, {self.what!r} came")


class RanksView:
    """``engine.host_view.HostView`` of pages that several ranks keep, each its own heads.

    TransferFailed where one of them cannot do it, PeerSilent where one is gone.
    """

    in_device: DeviceMemory | None = None  # no device has all heads

    def __init__(self, own: StagedView, ranks: Ranks) -> None:
        """``own``: rank 0's. Every other rank has the other end of one of ``ranks.moves``."""
        self.bytes: NDArray[np.uint8] = own.bytes
        self._own, self._ranks = own, ranks
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def step(self, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> Iterator[Hooks]:
        """Every rank has its own step around its part; the backend runs the hooks."""
        yield before_layer, on_layer

    def came_in(self, layer: int, pages: Sequence[int]) -> None:
        if pages:
            self._everywhere(Move("came_in", layer, _plain(pages)))

    def landed(self, layer: int) -> None:
        self._everywhere(Move("landed", layer, ()))

    def behind(self, pages: Sequence[int]) -> bool:
        return self._own.behind(pages)

    def gone_out(self, pages: Sequence[int]) -> None:
        if self._own.behind(pages):
            self._everywhere(Move("gone_out", 0, _plain(pages)))

    def copy_page(self, source: int, target: int) -> None:
        self._everywhere(Move("copy_page", int(source), (int(target),)))

    def fill(self, pages: Sequence[int], byte: int) -> None:
        """Raises nothing of another rank: whoever frees pages has nothing to do about that. Pages of one that is gone went with
        it; one that cannot fill its pages is taken for lost, since what it keeps there is no longer what is known here."""
        numbers = _plain(pages)
        for first in range(0, len(numbers), _MOST_PAGES):
            move = Move("fill", byte, numbers[first : first + _MOST_PAGES])
            try:
                self._everywhere(move)
            except PeerSilent:
                move.on(self._own)
            except TransferFailed as e:
                self._ranks.lose(f"a rank of this worker could not overwrite freed pages: {e.message}")

    def _everywhere(self, move: Move) -> None:
        record = asdict(move)
        with self._one_at_a_time:
            self._ranks.require()
            try:
                for line in self._ranks.moves:
                    line.send_record(record)
            except OSError as e:
                raise self._ranks.gone(e) from e
            try:
                move.on(self._own)
            finally:
                troubles = self._answers()
        if troubles:
            raise TransferFailed(f"another rank of this worker: {troubles[0]}")

    def _answers(self) -> list[str]:
        try:
            return [said for line in self._ranks.moves if (said := line.record()["trouble"])]
        except (OSError, EOFError) as e:
            raise self._ranks.gone(e) from e


class Mover:
    """Another rank's end: a thread that lives until ``close``, or until rank 0 has closed its own."""

    def __init__(self, end: socket.socket, view: StagedView, device: torch.device) -> None:
        self._end, self._line = end, Line(end)
        self._view, self._device = view, device
        self._thread = threading.Thread(target=self._run, name="moves", daemon=True)
        self._thread.start()

    def close(self) -> None:
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # rank 0 has ended it
        self._thread.join()
        self._line.close()

    def _run(self) -> None:
        enter(self._device)
        with torch.inference_mode():  # as this rank's pages were made
            try:
                while True:
                    self._line.send_record({"trouble": self._trouble(self._line.record())})
            except (OSError, EOFError):
                pass

    def _trouble(self, record: Any) -> str:
        """Why it could not be done; empty: it is."""
        try:
            Move(**record).on(self._view)
        except (MoonpoolError, RuntimeError, MemoryError) as e:
            return f"{type(e).__name__}: {e}"
        return ""


def _plain(pages: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(page) for page in pages)
