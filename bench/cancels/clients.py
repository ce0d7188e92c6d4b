"""Clients that leave: a plain socket closed at a chosen instant, beside clients that stay and check their answers."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import aiohttp

from moonpool.bench.cancels.scenes import Ask

DEADLINE_HEADER = "x-deadline-ms"
READ_S = 90.0  # an answer takes no longer, whatever happens
PATIENCE_S = 10.0  # that requests of a burst have
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Seen:
    """What the clients saw. ``wrong`` are answers that differ from the oracle's, ``odd`` ends that must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


class Clients:
    def __init__(self, host: str, port: int, session: aiohttp.ClientSession, random: Random, seen: Seen) -> None:
        """``session`` posts to the same server."""
        self._host, self._port = host, port
        self._session = session
        self._random = random
        self.seen = seen
        self.first_s = 0.1  # until the first event of an answer, at the moment

    async def ask(self, ask: Ask) -> None:
        if ask.cut_s is not None:
            await self._leave(ask, ask.cut_s)
        elif ask.deadline_s is not None:
            await self._too_late(ask)
        else:
            await self._stay(ask)

    async def end_of(self, ask: Ask) -> str:
        """``answered``, ``refused`` (also for want of time: it has 10 s), or ``odd``, which is remembered."""
        status, text = await self._post(ask, {DEADLINE_HEADER: f"{1e3 * PATIENCE_S:.0f}"})
        if status == 200:
            return "answered"
        if status in (429, 503, 504):
            return "refused"
        self.seen.odd.append(f"status {status}, {text[-200:]!r}")
        return "odd"

    async def _leave(self, ask: Ask, seconds: float) -> None:
        """Sends the request and closes the connection, in order or by a reset, whatever has come back by then."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(_request(ask))
            answered = asyncio.ensure_future(_first(reader, ask.after_first))
            if ask.after_first:
                await asyncio.wait({answered}, timeout=READ_S)
                answered = asyncio.ensure_future(reader.read())
            await asyncio.wait({answered}, timeout=seconds)
            self.seen.counts["cut_after_its_end" if answered.done() else "cut"] += 1
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)
        except OSError as e:
            self.seen.odd.append(f"cut request: {type(e).__name__}: {e}")
        finally:
            if self._random.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
            writer.transport.abort()

    async def _too_late(self, ask: Ask) -> None:
        status, text = await self._post(ask, {DEADLINE_HEADER: f"{1e3 * (ask.deadline_s or 0.0):.3f}"})
        if status == 200 and not ask.stream:
            end = "in_time"
        elif status == 200:
            end = _stream_end(text)
        else:
            end = {504: "deadline", 429: "refused", 503: "refused"}.get(status, "odd")
        self.seen.counts[f"deadline_{end}" if end != "deadline" else end] += 1
        if end == "odd":
            self.seen.odd.append(f"request with a deadline: status {status}, {text[-200:]!r}")

    async def _stay(self, ask: Ask) -> None:
        status, text = await self._post(ask, {})
        if status in (429, 503):
            self.seen.counts["kept_refused"] += 1
            return
        try:
            ids = _ids(text, ask.stream) if status == 200 else ()
        except (ValueError, KeyError, TypeError):
            ids = ()
        if status != 200 or (ask.stream and _stream_end(text) != "in_time"):
            self.seen.odd.append(f"request that stays: status {status}, {text[-200:]!r}")
        elif ask.answer and ids != ask.answer:
            self.seen.wrong.append(f"prompt of {len(ask.prompt)}: {ids} instead of {ask.answer}")
        else:
            self.seen.counts["kept_answered"] += 1

    async def _post(self, ask: Ask, headers: dict[str, str]) -> tuple[int, str]:
        """Status and whole body; (0, reason) where the connection broke or nothing came."""
        begun = time.monotonic()
        try:
            sending = self._session.post("v1/completions", json=_body(ask), headers=headers)
            async with asyncio.timeout(READ_S), sending as response:
                if response.status == 200 and ask.stream:  # its head comes with the first event
                    self.first_s += (time.monotonic() - begun - self.first_s) / 4
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            return 0, f"{type(e).__name__}: {e}"


def _body(ask: Ask) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": ask.stream,
    }


def _request(ask: Ask) -> bytes:
    body = json.dumps(_body(ask)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: moonpool\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _first(reader: asyncio.StreamReader, event: bool) -> bytes:
    """Until the first event has begun, or until the connection ends."""
    if event:
        try:
            return await reader.readuntil(b"data: ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return b""
    return await reader.read()


def _events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def _stream_end(text: str) -> str:
    """``in_time``: a whole answer; ``deadline``: one error event that says so; anything else is ``odd``."""
    events = _events(text)
    errors = [event for event in events if event.startswith('{"error"')]
    if not errors:
        return "in_time" if events and events[-1] == "[DONE]" else "odd"
    code = json.loads(errors[0])["error"]["code"]
    return "deadline" if len(errors) == 1 and events[-1] == errors[0] and code == "deadline_passed" else "odd"


def _ids(text: str, stream: bool) -> tuple[int, ...]:
    if not stream:
        return tuple(json.loads(text)["choices"][0]["token_ids"])
    choices = [choice for event in _events(text) if event != "[DONE]" for choice in json.loads(event)["choices"]]
    return tuple(token for choice in choices for token in choice.get("token_ids") or ())
