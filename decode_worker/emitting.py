"""What attempts say to their gateways: ids, how they end, and how likely their prompts were."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from moonpool.core.lifetime import Instant
from moonpool.core.request import Emission, FinishReason, Sampled
from moonpool.decode_worker.live import Live
from moonpool.engine.engine import Engine
from moonpool.engine.sampler import finish_reason


class Emitter:
    def __init__(self, engine: Engine, counts: Counter[str]) -> None:
        self._engine, self._counts = engine, counts

    def all(self, live: Live, ids: tuple[Sampled, ...]) -> list[Live]:
        """Stream the next ids, of ``live`` and of its siblings if it has any, or that none is wanted; those that end by them.

        The first id has been appended to its sequence.
        """
        told: Iterable[Sampled | None] = ids or [None] * len(live.members)
        ended = []
        for member, sampled in zip(live.members, told, strict=True):
            if sampled is not None and member is not live:
                member.sequence.tokens.append(sampled.token)
            member.cached_tokens = live.cached_tokens
            if not member.over and self._one(member, sampled):
                ended.append(member)
        return ended

    def _one(self, live: Live, sampled: Sampled | None) -> bool:
        """Stream the id that was just appended, or that none is wanted; True when it ends the request."""
        for part in live.prompt_logprobs:
            live.stream.put(Emission(live.request, live.attempt.number, 0, prompt_logprobs=part))
        live.prompt_logprobs.clear()
        live.life.stamp(Instant.FIRST_TOKEN, time.monotonic())
        cached = live.cached_tokens if live.emitted == 0 else 0
        position, finish = live.position, self._finish_of(live, sampled)
        if sampled is not None:
            position -= 1
            live.emitted += 1
            self._counts["tokens"] += 1
        live.stream.put(Emission(live.request, live.attempt.number, position, sampled, finish, cached))
        return finish is not None

    def _finish_of(self, live: Live, sampled: Sampled | None) -> FinishReason | None:
        return FinishReason.LENGTH if sampled is None else self.finish(live, sampled.token, live.position - 1)

    def finish(self, live: Live, token: int, position: int) -> FinishReason | None:
        request = live.attempt.request
        reason = finish_reason(request.sampling, token, position + 1, self._engine.eos_ids)
        full = len(request.prompt) + position + 1 >= live.sequence.limit
        return FinishReason.LENGTH if reason is None and full else reason
