"""A fetch that comes in while the blocks before it are computed: computing from the front meets what comes for the back.

Where the fetch is late, computing goes on into its blocks, and takes what is left of them when it comes; where it is lost,
the whole prompt is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonpool.core.errors import MoonpoolError
from moonpool.core.ids import NodeId
from moonpool.core.membership import Member, Peers
from moonpool.core.placement import Segment, Source
from moonpool.core.use import Use
from moonpool.kvstore.client import WorkerStore
from moonpool.prefill_worker.prefix import CONNECT_MS, Found, Wait, fetch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ahead:
    """Blocks ``[first, end)`` of a prompt on their way from another node while those before them are computed.

    Those that come are the leading ones of them: ``Found.slots[i]`` is block ``first + i``.
    """

    first: int
    end: int
    fetching: asyncio.Task[Found]

    @property
    def lost(self) -> bool:
        """It is over, and nothing came."""
        return self.fetching.done() and not self.fetching.result().slots

    async def drop(self) -> None:
        """Nobody wants them any more; what has come stays in the pool."""
        self.fetching.cancel()
        await asyncio.wait({self.fetching})
        if not self.fetching.cancelled():
            await self.fetching.result().close()


def fetch_ahead(
    client: WorkerStore | None,
    here: NodeId,
    peers: Peers,
    keys: Sequence[bytes],
    matched: int,
    segments: Sequence[Segment],
    wait: Wait,
) -> Ahead | None:
    """Begin the fetch before which ``segments`` say that blocks are computed; None where there is none such.

    It is given up once computing all blocks up to its end, from ``matched`` on, would have taken less.
    """
    for front, segment in itertools.pairwise(segments):
        first, end = segment.first, min(segment.first + segment.count, len(keys))
        ahead = front.source is Source.RECOMPUTE and segment.source is Source.FETCH and matched < first < end
        store = peers.store_of(segment.node) if ahead and segment.node not in (None, here) else None
        if client is not None and store is not None:
            limit_ms = wait.limit_ms(end - matched) + CONNECT_MS
            run = _fetch_alone(client, here, keys[first:end], store, limit_ms, wait.use, move=segment.move)
            return Ahead(first, end, asyncio.create_task(run))
    return None


async def _fetch_alone(
    client: WorkerStore, here: NodeId, keys: Sequence[bytes], store: Member, limit_ms: int, use: Use, *, move: bool
) -> Found:
    """What comes; nothing where the fetch fails."""
    found = Found(client)
    try:
        await fetch(found, client, here, keys, store, limit_ms, use, move=move)
    except MoonpoolError as e:
        log.warning("fetch of %d blocks from %s: %s", len(keys), store.node, e)
    return found


def at_once(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same plan for who cannot compute blocks while those after them come in: it fetches both."""
    out: list[Segment] = []
    for segment in segments:
        before = out[-1] if out else None
        if before is not None and before.source is Source.RECOMPUTE and segment.source is Source.FETCH:
            segment = replace(segment, first=before.first, count=before.count + segment.count)
            out.pop()
        out.append(segment)
    return tuple(out)
