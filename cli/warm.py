"""``moonpool warm FILE``: computes prompts into the pool before anybody asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find

if TYPE_CHECKING:
    import ssl

    import aiohttp

    from moonpool.cluster.warming import Warmed, WarmPrompt
    from moonpool.core.errors import MoonpoolError

EXIT_SOME_FAILED = 1
PROGRESS_S = 1.0
_PATHS = {"chat": "v1/chat/completions", "completions": "v1/completions"}


def warm(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help='JSON lines: {"prompt": ...} or {"messages": [...]}.', show_default=False)
    ],
    model: Annotated[str, typer.Option("--model", help="For lines that name none; default: the first that is served.")] = "",
    url: Annotated[str, typer.Option("--url", help="Base URL of a gateway; default: the cluster that runs here.")] = "",
    concurrency: Annotated[int, typer.Option("--concurrency", help="Prompts under way at once.")] = 4,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for one prompt.")] = 600.0,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compute the prompts of FILE once each, so that their KV is in the pool; what is there already is left alone.

    The key in MOONPOOL_API_KEY says for which tenant, where keys are asked for. Exit code 1: some prompts failed.
    """
    from moonpool.cluster.identity.https import trusting
    from moonpool.cluster.warming import require_concurrency

    require_concurrency(concurrency)
    count = _count(file)
    running = None if url else find(name, config_file, settings)
    base = (running.url if running else url).rstrip("/")
    trust = trusting(running.local.trust) if running and running.local and running.local.trust else None
    began = time.monotonic()
    done = asyncio.run(_warm(base, trust, file, model, concurrency, timeout_s, count))
    told = {**done.to_json(), "seconds": round(time.monotonic() - began, 3)}
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print(
            f"{done.prompts} prompts, {done.prompt_tokens} tokens: {done.computed_tokens} computed, {done.cached_tokens} were "
            f"there already; {told['seconds']:.1f} s"
        )
    if done.failed:
        say(f"{done.failed} prompts failed; the first: {done.first_error}")
        sys.exit(EXIT_SOME_FAILED)


def _count(file: Path) -> int:
    from moonpool.cluster.warming import read_prompts
    from moonpool.core.errors import ConfigError

    count = 0
    for prompt in read_prompts(file):
        if prompt.tenant:
            raise ConfigError(
                f"FILE: {file}, line {prompt.line}: tenant {prompt.tenant!r} is for gateway.warm_file; here the key in "
                "MOONPOOL_API_KEY says whose prompts these are", param="FILE",
            )  # fmt: skip
        count += 1
    return count


async def _warm(
    base: str, trust: ssl.SSLContext | None, file: Path, model: str, concurrency: int, timeout_s: float, count: int
) -> Warmed:
    import aiohttp

    from moonpool.cluster.warming import read_prompts, warm

    key = os.environ.get("MOONPOOL_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(ssl=trust if trust is not None else True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    shown = _Progress(count)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        default = model or await _first_model(session, base)

        async def send(prompt: WarmPrompt) -> tuple[int, int]:
            usage = (await _call(session, "POST", f"{base}/{_PATHS[prompt.endpoint]}", prompt.raw(default)))["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        return await warm(read_prompts(file), send, concurrency, shown)


class _Progress:
    def __init__(self, count: int) -> None:
        self._count, self._said = count, time.monotonic()

    def __call__(self, so_far: Warmed) -> None:
        now = time.monotonic()
        if now >= self._said + PROGRESS_S:
            self._said = now
            say(f"{so_far.prompts + so_far.failed} of {self._count} prompts, {so_far.computed_tokens} tokens computed")


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    return str((await _call(session, "GET", f"{base}/v1/models", None))["data"][0]["id"])


async def _call(session: aiohttp.ClientSession, method: str, url: str, body: bytes | None) -> Any:
    """The answer's JSON; else a MoonpoolError with the server's own words."""
    import aiohttp

    from moonpool.core.errors import NoPath

    try:
        async with session.request(method, url, data=body, headers={"content-type": "application/json"}) as response:
            text = await response.text()
            if response.status == HTTPStatus.OK:
                return json.loads(text)
            raise _refusal(response.status, text, response.headers.get("retry-after", ""))
    except (aiohttp.ClientError, OSError, ValueError) as e:
        raise NoPath(f"--url: {url} does not answer ({e}); is the cluster up?", retry_after_s=1.0) from e


def _refusal(status: int, text: str, retry_after: str) -> MoonpoolError:
    from moonpool.core.errors import InvalidRequest, Overloaded

    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:300]
    hint = " (the key that is sent is MOONPOOL_API_KEY)" if status == HTTPStatus.UNAUTHORIZED else ""
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Overloaded(text, retry_after_s=float(retry_after) if retry_after.isdecimal() else 1.0)
    return InvalidRequest(f"HTTP {status}: {text}{hint}")
