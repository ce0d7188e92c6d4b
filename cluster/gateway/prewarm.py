"""Prompts of ``gateway.warm_file``, computed into the pool once their model has a path, beside the serving."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import structlog

from moonpool.cluster.gateway.bodies import parse_chat, parse_completion
from moonpool.cluster.gateway.served import Models
from moonpool.cluster.gateway.tenants.caller import Caller
from moonpool.cluster.warming import WarmPrompt, read_prompts, warm
from moonpool.core.errors import MoonpoolError
from moonpool.core.lifetime import Instant, Lifetime

AT_ONCE = 2  # others are served meanwhile
LOOK_S = 0.2  # at whether there is a path yet
_log = structlog.get_logger()


class Prewarm:
    """``caller_of`` gives whom a tenant's name stands for (empty: nobody's in particular); ``default``: the model of lines
    that name none."""

    def __init__(self, models: Models, default: str, caller_of: Callable[[str], Caller]) -> None:
        self._models, self._default, self._caller_of = models, default, caller_of
        self._now = asyncio.get_running_loop().time
        self._task: asyncio.Task[None] | None = None

    def begin(self, path: Path) -> None:
        self._task = asyncio.create_task(self._run(path), name="gateway-prewarm")

    async def _run(self, path: Path) -> None:
        try:
            done = await warm(read_prompts(path), self._send, AT_ONCE)
        except* MoonpoolError as e:
            _log.warning("prompts not computed ahead", file=str(path), error=str(e.exceptions[0]))
        else:
            _log.info("prompts computed ahead", file=str(path), **done.to_json())

    async def _send(self, prompt: WarmPrompt) -> tuple[int, int]:
        raw = prompt.raw(self._default)
        body = parse_chat(raw) if prompt.endpoint == "chat" else parse_completion(raw)
        caller = self._caller_of(prompt.tenant)
        model = self._models.find(body.model, caller)
        while model.roster.missing():  # noqa: ASYNC110  membership tells many changes, and none of them is "there is a path"
            await asyncio.sleep(LOOK_S)
        lifetime = Lifetime()
        lifetime.stamp(Instant.ARRIVED, self._now())
        id = f"warm-{secrets.token_hex(12)}"
        generation = await model.intake.generation(id, body, len(raw), {}, lifetime, caller)
        async with aclosing(generation.pieces()) as pieces:
            async for _ in pieces:
                pass
        return generation.usage.prompt, generation.usage.cached

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
