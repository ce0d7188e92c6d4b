"""Computes prompts of a file into the pool, once each, before anybody asks: system prompts, documents, tool lists.

A file has one JSON object a line: {"prompt": ...} or {"messages": [...], "tools": [...]}, with ``model`` and ``cache_salt``
where needed, in the words of the endpoints. Each line goes the way of every request, with one token of output and the
lowest priority, so that its whole blocks are in the pool afterwards. What is there already is not computed again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError, InvalidRequest, MoonpoolError, Refused
from moonpool.core.parsing import read_json

LEAST_URGENT = 100  # in vLLM's way, where the smallest goes first
TRIES = 20  # of a prompt that is refused for now
_CHAT = frozenset({"messages", "tools", "tool_choice", "chat_template_kwargs"})
_EITHER = frozenset({"model", "tenant", "cache_salt", "prompt_cache_key", "prompt_cache_retention"})


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """``body`` is that of ``endpoint`` (chat or completions). ``tenant``: of the line; empty: whoever asks."""

    line: int
    endpoint: str
    body: dict[str, Any]
    tenant: str = ""

    def raw(self, model: str) -> bytes:
        """``model``: of a line that names none."""
        return json.dumps({"model": model, **self.body}).encode()


@dataclass(slots=True)
class Warmed:
    """``computed_tokens``: prompt tokens whose KV was not there. ``failed``: prompts, with the first one's error."""

    prompts: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_error: str = ""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "computed_tokens": self.computed_tokens}


Send = Callable[[WarmPrompt], Awaitable[tuple[int, int]]]  # gives (prompt tokens, cached ones of these)


def read_prompts(path: Path) -> Iterator[WarmPrompt]:
    """As they are in the file. ConfigError naming the line that is none."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _prompt(path, number, text)
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"FILE: cannot read {path}: {why}; give a file of JSON lines", param="FILE") from e


def count_prompts(path: Path) -> int:
    """ConfigError as from ``read_prompts``."""
    return sum(1 for _ in read_prompts(path))


def _prompt(path: Path, number: int, text: str) -> WarmPrompt:
    try:
        value = read_json(text)
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        if ("prompt" in value) == ("messages" in value):
            raise ValueError("it needs exactly one of prompt and messages")
        chat = "messages" in value
        if odd := sorted(value.keys() - _EITHER - (_CHAT if chat else {"prompt"})):
            raise ValueError(f"{odd[0][:100]!r} has no place in it")
        tenant = value.pop("tenant", "")
        if not isinstance(tenant, str) or not isinstance(value.get("model", ""), str):
            raise ValueError("tenant and model are names")
    except ValueError as e:
        raise ConfigError(f"FILE: {path}, line {number}: {e}", param="FILE") from e
    few = {"max_tokens": 1, "temperature": 0, "priority": LEAST_URGENT}
    return WarmPrompt(number, "chat" if chat else "completions", {**value, **few}, tenant)


async def warm(
    prompts: Iterator[WarmPrompt], send: Send, concurrency: int, progress: Callable[[Warmed], None] = lambda so_far: None
) -> Warmed:
    """Every one of ``prompts``, ``concurrency`` at once. A prompt that fails is counted, and the others go on."""
    so_far = Warmed()

    async def worker() -> None:
        for prompt in prompts:  # shared: each takes the next one
            await _one(prompt, send, so_far)
            progress(so_far)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return so_far


async def _one(prompt: WarmPrompt, send: Send, so_far: Warmed) -> None:
    for left in reversed(range(TRIES)):
        try:
            tokens, cached = await send(prompt)
        except Refused as e:
            if left:
                await asyncio.sleep(e.retry_after_s)
                continue
            _failed(prompt, e, so_far)
        except MoonpoolError as e:
            _failed(prompt, e, so_far)
        else:
            so_far.prompts += 1
            so_far.prompt_tokens += tokens
            so_far.cached_tokens += cached
        return


def _failed(prompt: WarmPrompt, error: MoonpoolError, so_far: Warmed) -> None:
    so_far.failed += 1
    so_far.first_error = so_far.first_error or f"line {prompt.line}: {error.message}"


def require_concurrency(n: int) -> None:
    if n < 1:
        raise InvalidRequest(f"--concurrency: {n} is too few; give 1 or more", param="concurrency")
