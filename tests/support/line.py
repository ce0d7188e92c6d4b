"""A TCP line between a client and a server that can be cut, or fall silent."""

from __future__ import annotations

import asyncio


class Line:
    """``port`` leads to ``target``. A silent line keeps its connections and carries nothing; a cut one refuses."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open, self._ends = asyncio.Event(), set[asyncio.StreamWriter]()
        self._open.set()
        self._cut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Line:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        self._cut = True
        for end in self._ends:
            end.transport.abort()

    def fall_silent(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._cut = False
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._ends |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()
            self._ends.discard(sink)
