"""Steady traffic through every gateway of a cluster, as a careful client sends it: who is refused goes to the next gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

TRIES = 40
PAUSE_S = 0.1


@dataclass
class SteadyLoad:
    """``users`` side by side, each one request after the other with a rest between them, which leaves cores to those that
    start; every second one streamed; ``urls`` are asked for anew when a gateway does not answer.

    ``counts``: refused_connections (nobody listened), goodbyes (503 of a gateway that leaves, and idle connections closed
    under a request), streamed, whole; none of them is a loss. ``lost``: what no retry may mend.
    """

    urls: Callable[[], list[str]]
    prompts: Sequence[tuple[int, ...]]
    tokens: int
    users: int = 4
    rest_s: float = 0.2
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until ``enough`` is set; requests under way are finished."""
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            await asyncio.gather(*(self._user(client, number) for number in range(self.users)))

    async def _user(self, client: httpx.AsyncClient, number: int) -> None:
        urls: Iterator[str] = itertools.cycle(self.urls())
        for turn in itertools.count(number):
            if self.enough.is_set():
                return
            prompt = self.prompts[turn % len(self.prompts)]
            for _ in range(TRIES):
                url = next(urls)
                if await self._ask(client, url, prompt, streamed=turn % 2 == 0):
                    break
                await asyncio.sleep(PAUSE_S)
                urls = itertools.cycle([u for u in await asyncio.to_thread(self.urls) if u != url] or [url])
            else:
                self.lost.append(f"{TRIES} tries and no answer")
            urls = itertools.cycle(await asyncio.to_thread(self.urls)) if turn % 5 == 0 else urls
            await asyncio.sleep(self.rest_s)

    async def _ask(self, client: httpx.AsyncClient, url: str, prompt: tuple[int, ...], *, streamed: bool) -> bool:
        """False: nothing of an answer came, the next gateway is to be asked."""
        body = {
            "model": "smollm2",
            "prompt": list(prompt),
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": streamed,
        }
        try:
            ids = await (self._stream(client, url, body) if streamed else self._whole(client, url, body))
        except httpx.ConnectError:
            self.counts["refused_connections"] += 1
            return False
        except httpx.RemoteProtocolError as e:
            if "without sending" not in str(e):
                raise
            self.counts["goodbyes"] += 1
            return False
        except httpx.TransportError as e:
            self.lost.append(f"{url}: {type(e).__name__} {e}")
            return True
        if ids is None:
            self.counts["goodbyes"] += 1
            return False
        self.counts["streamed" if streamed else "whole"] += 1
        self.answers.append((prompt, ids))
        return True

    async def _whole(self, client: httpx.AsyncClient, url: str, body: dict[str, object]) -> tuple[int, ...] | None:
        response = await client.post(f"{url}/v1/completions", json=body)
        if self._leaves(response.status_code, response.text):
            return None
        return tuple(response.json()["choices"][0]["token_ids"]) if response.status_code == 200 else ()

    async def _stream(self, client: httpx.AsyncClient, url: str, body: dict[str, object]) -> tuple[int, ...] | None:
        ids: list[int] = []
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return None if self._leaves(response.status_code, text) else ()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.lost.append(f"{url}: after {len(ids)} ids: {event['error']['message']}")
                    return tuple(ids)
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
        return tuple(ids)

    def _leaves(self, status: int, text: str) -> bool:
        if status == 200:
            return False
        if status == 503 and "gateway: leaving" in text:
            return True
        self.lost.append(f"HTTP {status}: {text[:300]}")
        return False
