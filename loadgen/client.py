"""One streamed completion over HTTP, timed on the client's clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from moonpool.core.errors import ConfigError
from moonpool.loadgen.clock import Clock
from moonpool.loadgen.record import Outcome
from moonpool.loadgen.stream import StreamReader, StreamReading, error_in

_REFUSED = (429, 503)
_ID_HEADERS = ("x-moonpool-request-id", "x-request-id")
_MAX_ERROR_BODY = 64 * 1024
# Below the keep-alive time of common servers (uvicorn: 5 s), so a send never meets a connection that is just being closed.
_KEEPALIVE_S = 2.0


@dataclass(slots=True)
class Answer:
    """Filled while the answer arrives, so that what is known survives a cancellation. Times are on the client's clock."""

    sent: float | None = None
    ended: float | None = None
    status: int = 0
    outcome: Outcome = Outcome.CANCELLED
    reason: str = ""
    retry_after_s: float | None = None
    request_id: str = ""  # the server's own name for it (``moonpool explain`` takes it), else what it echoed
    reading: StreamReading = field(default_factory=StreamReading)


class Sender(Protocol):
    async def send(self, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        """Send one request and fill ``answer``. Whatever the server does is told by ``answer.outcome``, never raised."""


def open_session(url: str, *, timeout_s: float, api_key: str = "") -> aiohttp.ClientSession:
    """A session to ``url`` without any cap on connections: a cap would quietly turn an open loop into a closed one."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url: {url!r} is not an HTTP address; give one such as http://127.0.0.1:8000", param="url")
    return aiohttp.ClientSession(
        base_url=url.rstrip("/") + "/",
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=1 << 20,
    )


class HttpSender:
    """Posts to ``v1/completions`` of an OpenAI-compatible server."""

    def __init__(self, session: aiohttp.ClientSession, clock: Clock, *, path: str = "v1/completions") -> None:
        self._session = session
        self._clock = clock
        self._path = path

    async def send(self, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        answer.sent = self._clock.now()
        try:
            async with self._session.post(
                self._path, data=body, headers={"content-type": "application/json", **headers}
            ) as response:
                answer.status = response.status
                answer.request_id = next((response.headers[name] for name in _ID_HEADERS if name in response.headers), "")
                if response.status == 200:
                    await self._read_stream(response, answer)
                else:
                    await _read_error(response, answer)
        except TimeoutError:
            _fail(answer, "timed out")
        except (aiohttp.ClientError, OSError, ValueError) as e:
            _fail(answer, f"{type(e).__name__}: {e}"[:200])
        answer.ended = self._clock.now()

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        reader = StreamReader()
        answer.reading = reader.reading
        async for data in response.content.iter_any():
            reader.feed(data, self._clock.now())
        if reader.reading.error:
            _fail(answer, reader.reading.error_code or reader.reading.error)
        elif not (reader.reading.done or reader.reading.finish_reason):
            _fail(answer, "the stream ended before the answer did")
        else:
            answer.outcome = Outcome.OK


async def _read_error(response: aiohttp.ClientResponse, answer: Answer) -> None:
    raw = await response.content.read(_MAX_ERROR_BODY)
    try:
        message, code = error_in(json.loads(raw))
    except (ValueError, RecursionError):
        message, code = raw[:200].decode(errors="replace"), ""
    answer.outcome = Outcome.REFUSED if response.status in _REFUSED else Outcome.FAILED
    answer.reason = code if answer.outcome is Outcome.REFUSED and code else f"{response.status} {code or message}".strip()
    answer.retry_after_s = _seconds(response.headers.get("Retry-After"))


def _fail(answer: Answer, reason: str) -> None:
    answer.outcome = Outcome.FAILED
    answer.reason = reason


def _seconds(value: str | None) -> float | None:
    """Retry-After in seconds; the form with a date is not used by the servers this is for."""
    try:
        return float(value) if value is not None else None
    except ValueError:
        return None


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model the server lists. ConfigError where nothing answers or nothing is listed."""
    try:
        async with session.get("v1/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            listed: Any = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError) as e:
        raise ConfigError(
            f"url: no answer from {url} ({type(e).__name__}: {e}); start a cluster or give its address", param="url"
        ) from e
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as e:
        raise ConfigError(f"model: {url} lists none; name the model to ask for", param="model") from e
