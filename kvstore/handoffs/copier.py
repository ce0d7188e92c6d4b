"""The copy thread: landed slices from the pool's mapping into device pages, verified there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moonpool.core.errors import DigestMismatch, MoonpoolError
from moonpool.core.landing import LandingSlot, SlotRef
from moonpool.core.page_view import PageView
from moonpool.kvstore.client import WorkerStore


@dataclass(frozen=True, slots=True)
class BadCopy:
    """What went wrong; ``slot`` is to be quarantined where its bytes were not what they should be."""

    error: MoonpoolError
    slot: SlotRef | None


class Copier:
    """One thread for all hand-offs, in the order of the requests."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._thread = ThreadPoolExecutor(1, "landing copy")
        self._loop = asyncio.get_running_loop()

    def copy(
        self,
        client: WorkerStore,
        layer: int,
        work: Sequence[tuple[LandingSlot, int]],
        stop: threading.Event,
        done: Callable[[BadCopy | None], None],
    ) -> None:
        """Copy ``layer`` of each (slot, page). ``done`` is called on the event loop, once, also when ``stop`` cut it short.

        The caller holds the pages until then.
        """

        def run() -> None:
            bad = self._copy(client, layer, work, stop)
            self._loop.call_soon_threadsafe(done, bad)

        self._thread.submit(run)

    def close(self) -> None:
        """Blocks until what was asked for is done."""
        self._thread.shutdown(wait=True)

    def _copy(
        self, client: WorkerStore, layer: int, work: Sequence[tuple[LandingSlot, int]], stop: threading.Event
    ) -> BadCopy | None:
        for slot, page in work:
            if stop.is_set():
                return None
            try:
                client.read_slice(slot.slot, layer, self._view.bytes[page, layer], slot.valid)
            except DigestMismatch as e:
                return BadCopy(e, slot.slot)
            except MoonpoolError as e:
                return BadCopy(e, None)
        try:
            self._view.came_in(layer, [page for _, page in work])
        except MoonpoolError as e:
            return BadCopy(e, None)
        return None
