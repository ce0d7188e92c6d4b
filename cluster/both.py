"""Role ``both``: prompts and answers in one process, with a local hand-off; and decode workers that may do the same.

The laptop mode, the cache-off oracle (``engine.reuse = false``), and mixed batches: prompt chunks and decode rows share
one forward pass. Works with and without a store node on its host.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from moonpool.core.config import Config
from moonpool.core.membership import LinkTiming, Member, Peers, PrefillTiming, WorkerReport
from moonpool.decode_worker.live import Live
from moonpool.decode_worker.worker import DecodeWorker
from moonpool.engine.engine import Engine
from moonpool.kvstore.link import StoreLink
from moonpool.prefill_worker.ahead import at_once
from moonpool.prefill_worker.pace import Pace
from moonpool.prefill_worker.prefix import PrefixLoad, Wait, find, quarantine

MAX_TIMINGS = 1_024  # between two reports


class PoolPrefix:
    """Loads what the pool holds of a prompt before the prompt joins the batch: other rows compute meanwhile."""

    def __init__(self, engine: Engine, peers: Peers, link: StoreLink) -> None:
        self._engine, self._peers, self._link = engine, peers, link
        self._thread = ThreadPoolExecutor(1, "prefix load")
        self.pace = Pace()
        self.links: deque[LinkTiming] = deque(maxlen=MAX_TIMINGS)

    async def load(self, live: Live, matched: int) -> int:
        """Blocks that lead the sequence's pages now. Cancelled: on return nobody writes the pages any more."""
        sequence, client = live.sequence, self._link.client
        deadline_ms = live.attempt.deadline_ms
        wait = Wait(self.pace, self._engine.layout.block_tokens, deadline_ms, live.attempt.request.use)
        segments = at_once(live.placement.segments)  # other rows compute meanwhile
        found = await find(client, self._link.node, self._peers, sequence.keys, matched, segments, wait)
        live.fetch_seconds += found.fetch_seconds
        live.fetched_tokens += found.fetched_bytes // self._engine.layout.block_bytes * self._engine.layout.block_tokens
        self.links.extend(found.links)
        found.cut(matched, self._engine.pages.quantum)
        if client is None or not found.slots:
            return matched
        pages = sequence.pages[matched : matched + len(found.slots)]
        load = PrefixLoad(client, found.slots, matched, pages, self._engine.view, self._engine.layout)
        load.start(self._thread)
        try:
            await load.ended()
        finally:
            load.stop()
            await load.ended()
            await found.close()
        if load.bad is not None:
            await quarantine(client, *load.bad)
        return matched + load.blocks

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)


class BothWorker(DecodeWorker):
    """A decode worker that computes prompts whose placements name itself as the prefill worker, with the pool as a source of
    prefixes. In role ``both`` that is all of them; in role ``decode`` those that the conductor colocates, beside hand-offs."""

    def __init__(self, config: Config, engine: Engine, member: Member, peers: Peers, hash_key: bytes) -> None:
        super().__init__(config, engine, member, peers, hash_key)
        self._pool_prefix = self._filler.prefix = PoolPrefix(engine, peers, self._filler.link)

    def measured(self, timing: PrefillTiming) -> None:
        self._pool_prefix.pace.measured(timing.prompt_tokens - timing.cached_tokens, timing.seconds - timing.load_seconds)

    def report(self) -> WorkerReport:
        links = tuple(self._pool_prefix.links)
        self._pool_prefix.links.clear()
        return replace(super().report(), links=links)

    async def close(self) -> None:
        await super().close()
        await self._pool_prefix.close()
