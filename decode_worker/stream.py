"""What goes down one gateway's token stream: emissions gathered until the wire takes them."""

from __future__ import annotations

import asyncio
from collections import Counter

from moonpool.core.request import Emission

MAX_PENDING = 65_536  # emissions a gateway may be behind before its stream is closed


class TokenStream:
    """Event-loop only. Emissions put between two ``take`` calls travel as one message: one per engine step."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        """``counts``: where messages are counted, as ``messages``."""
        self._counts = Counter() if counts is None else counts
        self._pending: list[Emission] = []
        self._ready = asyncio.Event()
        self._closed = False
        self.overflowed = False

    def put(self, emission: Emission) -> None:
        """Queue it. A reader too far behind loses the stream, and with it all its attempts: memory stays bounded."""
        if self._closed:
            return
        if len(self._pending) >= MAX_PENDING:
            self.overflowed = True
            self.close()
            return
        self._pending.append(emission)
        self._ready.set()

    async def take(self) -> list[Emission]:
        """Everything pending, at least one emission; empty once the stream is closed and read out."""
        await self._ready.wait()
        taken, self._pending = self._pending, []
        self._counts["messages"] += bool(taken)
        if not self._closed:
            self._ready.clear()
        return taken

    def close(self) -> None:
        """No more emissions. What is pending can still be taken, unless the reader was too slow."""
        self._closed = True
        if self.overflowed:
            self._pending.clear()
        self._ready.set()
