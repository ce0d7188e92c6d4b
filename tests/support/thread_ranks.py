"""Ranks as threads of this process: the same lines, groups and steps as with processes, without the seconds that these take."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from moonpool.engine.tensor_parallel import start
from moonpool.engine.tensor_parallel.keeping import Keeping
from moonpool.engine.tensor_parallel.line import Line, Sums
from moonpool.engine.tensor_parallel.rank import Rank, Start
from moonpool.engine.tensor_parallel.ranks import STEP_S, Ranks, meeting_folder


class ThreadRanks(Ranks):
    """``made`` are the ranks 1 and above, once they have their weights."""

    def __init__(self, count: int, sums: Sums, keeping: Keeping) -> None:
        self.count, self.sums, self.keeping, self.step_s = count, sums, keeping, STEP_S
        self.folder = meeting_folder(sums)
        self.lost: Future[str] = Future()
        self.lines: list[Line] = []
        self.moves: list[Line] = []
        self.pids: list[int] = []
        self.pages = None
        self.made: dict[int, Rank] = {}
        self._losing = threading.Lock()
        self._threads = []
        for number in range(1, count + 1):
            ours, theirs = socket.socketpair()
            self.lines.append(Line(ours))
            thread = threading.Thread(target=self._run, args=(number, Line(theirs)), name=f"rank {number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, number: int, line: Line) -> None:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                self.made[number] = Rank(line, Start(**line.record()))
                self.made[number].run()
        except EOFError:
            pass  # closed before it had begun
        finally:
            line.close()

    def close(self) -> None:
        for line in self.lines:
            try:
                line.send_end(1.0)
            except OSError:
                pass
            line.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for line in self.moves:
            line.close()
        if self.pages is not None:
            self.pages.close()
        self.remove_folder()


@contextmanager
def ranks_in_threads(*, apart: bool = False) -> Iterator[Callable[[], ThreadRanks]]:
    """Engines loaded meanwhile have their ranks in threads; the function gives the newest. All are closed in the end.

    ``apart``: each rank keeps pages of its own, as on GPUs.
    """
    made: list[ThreadRanks] = []

    class Starting(ThreadRanks):
        @classmethod
        def start(cls, count: int, sums: Sums, keeping: Keeping, waits_s: float = 0.0) -> ThreadRanks:
            made.append(ThreadRanks(count, sums, replace(keeping, apart=True) if apart else keeping))
            return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start, "Ranks", Starting)
        yield lambda: made[-1]
    for ranks in made:
        if any(thread.is_alive() for thread in ranks._threads):
            ranks.close()
