"""Clients of a struck cluster: each holds conversations, turn by turn, and asks the other gateway when one is gone.

Every answer is held against the oracle's by token ids, also what came before an error or a cancellation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from moonpool.bench.chaos.catalogue import Conversation, Turn
from moonpool.bench.chaos.runlog import RunLog
from moonpool.bench.chaos.tally import End, Ended
from moonpool.core.errors import STATUS, Reason

CLIENTS = 6
ANSWER_S = 90.0  # a client gives up; longer than the cluster's own budget
CANCELLED_SHARE = 0.08
CONNECT_S = 2.0
THINK_S = 0.3
REFUSED_PAUSE_S = 0.5
GATEWAYS = ("gateway-0", "gateway-1")


# Reasons that a client may be refused for: not now, or not in time. Any other error is a defect.
CLEAN = frozenset(
    reason.value for reason in Reason if STATUS[reason][0] in (429, 503, 504) and reason is not Reason.DIGEST_MISMATCH
)


class BadAnswerError(Exception):
    """An answer that is no answer of the API."""


@dataclass(frozen=True, slots=True)
class _Error:
    code: str
    why: str

    @classmethod
    def of(cls, where: str, value: dict[str, Any]) -> _Error:
        told = value.get("error")
        if not isinstance(told, dict):
            raise BadAnswerError(f"{where}without an error object")
        return cls(str(told.get("code")), f"{where}{told.get('code')}: {told.get('message')}")


@dataclass(slots=True)
class Asked:
    number: int
    gateway: str
    sent_s: float
    ids: list[int] = field(default_factory=list)
    first_s: float | None = None
    finished: bool = False
    request: str = ""  # the gateway's id of it


class Load:
    """``urls`` are the gateways', kept fresh by whoever owns the mapping; ``gateway_struck``: until when each was struck."""

    def __init__(self, asked: Sequence[Conversation], urls: dict[str, str], log: RunLog, seed: int) -> None:
        self.conversations, self.urls, self._log, self._seed = asked, urls, log, seed
        self.in_flight: dict[int, Asked] = {}
        self.ended: list[Ended] = []
        self.gateway_struck: dict[str, float] = {}  # when a gateway was last being struck
        self._numbers = 0
        self._running = True
        self._session: aiohttp.ClientSession | None = None
        self._clients: list[asyncio.Task[None]] = []

    def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    def begin(self) -> None:
        self.open()
        self._clients = [asyncio.create_task(self._client(n), name=f"client-{n}") for n in range(CLIENTS)]

    async def end(self) -> None:
        """No further request is sent; those under way end by themselves, within ``ANSWER_S``."""
        self._running = False
        await asyncio.gather(*self._clients)
        await self.close()

    async def abandon(self) -> None:
        """Ends requests under way, too; a no-op after ``end``."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self.close()

    async def _client(self, number: int) -> None:
        rng = np.random.default_rng((self._seed, number))
        while self._going():
            conversation = self.conversations[int(rng.integers(len(self.conversations)))]
            for turn in range(len(conversation.answers)):
                if self._going():
                    await self._until_answered(conversation, turn, rng)
                    await asyncio.sleep(THINK_S * float(rng.exponential()))

    def _going(self) -> bool:
        return self._running

    async def _until_answered(self, conversation: Conversation, turn: int, rng: np.random.Generator) -> None:
        """Asks, and once more at the other gateway when the first one is gone."""
        first = int(rng.integers(2))
        cancel_at = int(rng.integers(1, 40)) if rng.random() < CANCELLED_SHARE else None
        for again in range(4):
            ended = await self.ask(GATEWAYS[(first + again) % 2], conversation, turn, cancel_at)
            if ended is None:  # nobody there: not a request yet
                await asyncio.sleep(0.05)
                continue
            if ended.end is End.REFUSED:
                await asyncio.sleep(REFUSED_PAUSE_S)
            if ended.end is not End.CUT:
                return

    async def ask(self, gateway: str, conversation: Conversation, turn: int, cancel_at: int | None) -> Ended | None:
        """One request; None where no connection could be made."""
        self._numbers += 1
        asked = Asked(self._numbers, gateway, self._log.now())
        self.in_flight[asked.number] = asked
        what, want = conversation.turns[turn], conversation.answers[turn]
        try:
            end, why = await self._outcome(asked, conversation.prompt(turn), what, want, cancel_at)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            self._log.write("unreachable", gateway=gateway, why=str(e)[:200])
            return None
        finally:
            del self.in_flight[asked.number]
        ended = Ended(asked.number, gateway, asked.sent_s, self._log.now(), end, asked.first_s, why)
        self.ended.append(ended)
        facts = {"n": ended.number, "gateway": gateway, "sent": round(ended.sent_s, 4), "end": end.value, "ids": len(asked.ids)}
        facts |= {"first": round(asked.first_s, 4)} if asked.first_s is not None else {}
        facts |= {"why": why, "id": asked.request} if why else {}
        facts |= {"want": list(want), "got": asked.ids} if end is End.WRONG else {}
        self._log.write("request", **facts)
        return ended

    async def _outcome(
        self, asked: Asked, prompt: Sequence[int], turn: Turn, want: Sequence[int], cancel_at: int | None
    ) -> tuple[End, str]:
        try:
            async for ids, error in self._answer(asked, prompt, turn):
                asked.ids += ids
                if ids and asked.first_s is None:
                    asked.first_s = self._log.now()
                if asked.ids != list(want[: len(asked.ids)]):
                    return End.WRONG, "ids differ from the oracle's"
                if error:
                    return (End.REFUSED if error.code in CLEAN else End.BROKEN), error.why
                if cancel_at is not None and len(asked.ids) >= cancel_at:
                    return End.CANCELLED, ""
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise
        except (aiohttp.ClientError, TimeoutError, ConnectionError, BadAnswerError) as e:
            why = f"{type(e).__name__}: {e} after {len(asked.ids)} ids"
            return (End.CUT if self._was_struck(asked) else End.LOST), why
        if len(asked.ids) != len(want) or not asked.finished:
            why = f"the answer ended after {len(asked.ids)} of {len(want)} ids"
            return (End.CUT if self._was_struck(asked) else End.LOST), why
        return End.COMPLETED, ""

    def _was_struck(self, asked: Asked) -> bool:
        return self.gateway_struck.get(asked.gateway, -1.0) >= asked.sent_s

    async def _answer(self, asked: Asked, prompt: Sequence[int], turn: Turn) -> AsyncIterator[tuple[list[int], _Error | None]]:
        """(ids, error) as they come; ends with the answer's own end."""
        assert self._session is not None
        body = {
            "model": "chaos",
            "prompt": list(prompt),
            "max_tokens": turn.max_tokens,
            "temperature": turn.temperature,
            "seed": turn.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": turn.stream,
        }
        async with self._session.post(f"{self.urls[asked.gateway]}/v1/completions", json=body) as response:
            asked.request = response.headers.get("x-moonpool-request-id", "")
            if response.status != 200 or not turn.stream:
                value = _parsed(await response.read())
                if response.status != 200:
                    yield [], _Error.of(f"{response.status} ", value)
                    return
                asked.finished = True
                yield value["choices"][0]["token_ids"], None
                return
            async for said in _events(response):
                if said is None:
                    asked.finished = True
                    return
                if "error" in said:
                    yield [], _Error.of("event ", said)
                    return
                for choice in said["choices"]:
                    yield choice.get("token_ids", []), None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """The stream's objects; None for its ``[DONE]``. A line may be long: it is read in parts."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield None if line == b"data: [DONE]" else _parsed(line[6:])


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as e:
        raise BadAnswerError(f"no JSON: {raw[:80]!r}") from e
    if not isinstance(value, dict):
        raise BadAnswerError(f"no object: {raw[:80]!r}")
    return value
