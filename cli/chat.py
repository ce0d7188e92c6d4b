"""``moonpool chat "question"``: one streaming chat request, printed as it comes."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any

import typer

from moonpool.cli.options import ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find


def chat(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    model: Annotated[str, typer.Option("--model", help="A model, alias or adapter; default: the first one served.")] = "",
    url: Annotated[str, typer.Option("--url", help="Base URL of a gateway; default: the cluster that runs here.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Ask one question and print the answer while it streams."""
    from moonpool.core.errors import NoPath

    running = None if url else find(name, config_file, settings)
    base = (running.url if running else url).rstrip("/")
    if running and running.local and running.local.trust:
        _trust(running.local.trust)
    body = {
        "messages": [{"role": "user", "content": question}],
        "model": model or _first_model(base),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    answer_id = ""
    for event in _events(f"{base}/v1/chat/completions", body):
        if "error" in event:
            sys.stdout.write("\n")
            raise NoPath(f"answer: {event['error'].get('message', event['error'])}", retry_after_s=1.0)
        answer_id = event.get("id", answer_id)
        for choice in event.get("choices", ()):
            sys.stdout.write(choice.get("delta", {}).get("content") or "")
            sys.stdout.flush()
    sys.stdout.write("\n")
    if sys.stderr.isatty():
        say(f"(why it was placed where it was: moonpool explain {answer_id})")


def _trust(cert: str) -> None:
    """The certificate of the gateway that runs here need not be of an authority that everybody knows."""
    from moonpool.cluster.identity.https import trusting

    urllib.request.install_opener(urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusting(cert))))


def _first_model(base: str) -> str:
    with _open(urllib.request.Request(f"{base}/v1/models")) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of every server-sent event, as it arrives."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with _open(request) as answer:
        for raw in answer:
            line = raw.decode().strip()
            if line.startswith("data:") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data:"))


def _open(request: urllib.request.Request) -> Any:
    """InvalidRequest or NoPath with the server's own words. ``MOONPOOL_API_KEY`` goes along where it is set."""
    from moonpool.core.errors import InvalidRequest, NoPath

    if key := os.environ.get("MOONPOOL_API_KEY"):
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as e:
        text = e.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            pass
        hint = " (the key that is sent is MOONPOOL_API_KEY)" if e.code == HTTPStatus.UNAUTHORIZED else ""
        raise InvalidRequest(f"HTTP {e.code}: {text}{hint}") from e
    except OSError as e:
        raise NoPath(f"--url: {request.full_url} does not answer ({e}); is the cluster up?", retry_after_s=1.0) from e
