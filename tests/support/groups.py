"""A group of prefill workers in one process, each on a node of its own, and what it makes of a prompt."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.blocks import blocks_for
from moonpool.core.request import Request
from moonpool.engine.engine import Engine, Row
from support.split import Split, split_path
from support.workers import Answer

SIZE = 16


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


@asynccontextmanager
async def group(folder: Path, model: Path, workers: int = 2, *, names: str = "abcd", **settings: Any) -> AsyncIterator[Split]:
    """Every prefill worker and the decode worker on a node of its own, or as ``names`` say, a letter each."""
    nodes, chunks = tuple(names[: workers + 1]), {"prefill_chunk": 32}
    async with split_path(folder, model, nodes=nodes, prefills=workers, prefill_config=chunks, **settings) as split:
        yield split


def count(split: Split, prefill: int, name: str) -> int:
    return int(split.prefills[prefill].numbers().get(f"{name}_count", 0))


async def answered(split: Split, request: Request) -> Answer:
    answer = await split.gateway.ask(request)
    assert answer.error is None, answer.error
    await split.idle()
    return answer


def check(split: Split, request: Request, answer: Answer) -> None:
    """The ids are those of one worker, and so are K and V of the prompt's whole blocks at the decode worker."""
    assert answer.ids == split.oracle(request)
    np.testing.assert_allclose(_kept(split, request), _computed(split.decode_engine, request), rtol=1e-3, atol=1e-4)


def _kept(split: Split, request: Request) -> NDArray[np.float32]:
    pool = split.decode_engine.pages
    pages = pool.match(request.keys)
    try:
        assert len(pages) == len(request.keys)
        return split.decode_engine.kv_bytes[pages].copy().view(np.float32)
    finally:
        pool.release(pages)


def _computed(engine: Engine, request: Request) -> NDArray[np.float32]:
    pages = engine.pages.allocate(blocks_for(len(request.prompt), SIZE))
    try:
        engine.forward([Row(list(request.prompt), 0, pages, True)])
        return engine.kv_bytes[pages[: len(request.keys)]].copy().view(np.float32)
    finally:
        engine.pages.release(pages)


class Halt:
    """Stops an engine's compute thread before its last layer while ``armed``, until ``go``; ``there`` says that it stands."""

    def __init__(self, engine: Engine) -> None:
        self.armed = True
        self.breaks = False
        self.there, self._go = threading.Event(), threading.Event()
        self._last = engine.layout.layers - 1
        forward = engine.forward

        def halting(*args: Any, before_layer: Any = None, **more: Any) -> Any:
            def before(layer: int) -> None:
                if layer == self._last and self.armed:
                    self._stand()
                if before_layer is not None:
                    before_layer(layer)

            return forward(*args, before_layer=before, **more)

        engine.forward = halting  # type: ignore[method-assign]

    def arm(self) -> None:
        self.there.clear()
        self._go.clear()
        self.armed, self.breaks = True, False

    def go(self, *, breaks: bool = False) -> None:
        """Not armed any more; ``breaks``: it goes on with an error."""
        self.armed, self.breaks = False, breaks
        self._go.set()

    def _stand(self) -> None:
        self.there.set()
        assert self._go.wait(30)
        if self.breaks:
            raise RuntimeError("out of luck")
