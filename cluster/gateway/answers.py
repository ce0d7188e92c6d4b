"""A generation's pieces as an answer: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from moonpool.cluster.gateway import sse
from moonpool.cluster.gateway.bodies import StreamOptions
from moonpool.cluster.gateway.choice import Piece
from moonpool.cluster.gateway.generation import Generation
from moonpool.cluster.gateway.http import error_value
from moonpool.cluster.gateway.shapes import JSON, Shape
from moonpool.core.errors import Bug, MoonpoolError


async def whole(generation: Generation, shape: Shape) -> bytes:
    """Its JSON, in ASCII."""
    choices: list[list[Piece]] = [[] for _ in generation.runs]
    async with aclosing(generation.pieces()) as pieces:
        async for index, piece in pieces:
            choices[index].append(piece)
    shown, usage = [choices[index] for index in generation.best()], generation.usage
    if generation.scored:
        return await asyncio.to_thread(lambda: sse.to_json(shape.whole(shown, usage)))
    return sse.to_json(shape.whole(shown, usage))


class Stream:
    """The events of one streamed answer.

    ``begin`` waits for the first id, so that everything refused or failed before it is a plain HTTP error. A later
    error becomes one last event; then the stream ends without ``[DONE]``.
    """

    def __init__(self, generation: Generation, shape: Shape, options: StreamOptions, on_end: Callable[[str], None]) -> None:
        """``on_end`` hears ``ok`` or the reason of the error; nothing when the client leaves first."""
        self._generation = generation
        self._shape = shape
        self._options = options
        self._on_end = on_end
        self._pieces = generation.pieces()
        self._first: tuple[int, Piece] | None = None

    async def begin(self) -> None:
        self._first = await anext(self._pieces)

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces):
            try:
                async for event in self._told():
                    yield event
            except MoonpoolError as e:
                self._on_end(e.reason.value)
                yield sse.event(error_value(e))
                return
            except Exception as e:  # noqa: BLE001  the client must not take a broken stream for a whole answer
                bug = Bug(f"gateway: {type(e).__name__} while streaming")
                self._on_end(bug.reason.value)
                yield sse.event(error_value(bug))
                return
        if self._options.include_usage:
            yield sse.event(self._shape.usage_chunk(self._generation.usage))
        self._on_end("ok")
        yield sse.DONE

    async def _told(self) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        async for index, piece in self._all():
            if index not in opened:
                opened.add(index)
                scored = self._generation.scored
                for event in await asyncio.to_thread(self._opening, index) if scored else self._opening(index):
                    yield event
            for chunk in self._shape.chunks(index, piece):
                yield self._event(chunk)

    def _opening(self, index: int) -> list[bytes]:
        return [self._event(chunk) for chunk in self._shape.opening(index)]

    def _event(self, chunk: JSON) -> bytes:
        return sse.event(self._with_usage(chunk))

    async def _all(self) -> AsyncGenerator[tuple[int, Piece], None]:
        if self._first is not None:
            yield self._first
        async for item in self._pieces:
            yield item

    def _with_usage(self, chunk: JSON) -> JSON:
        if not self._options.include_usage:
            return chunk
        return {**chunk, "usage": self._generation.usage.json() if self._options.continuous_usage_stats else None}

    async def close(self) -> None:
        await self._pieces.aclose()
