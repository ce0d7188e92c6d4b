"""How the verbs of ``moonpool store`` read which blocks are meant, ask the nodes, and make sure before they change much."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from moonpool.cli import store_view

if TYPE_CHECKING:
    from moonpool.cli.running import Running
    from moonpool.cluster.store_control import StoreControl
    from moonpool.cluster.store_replies import Reply

T = TypeVar("T")


def blocks_of(running: Running, keys: list[str] | None, prompt: str | None, chat: bool) -> list[bytes]:
    """The block keys that --keys or --prompt name."""
    from moonpool.core.errors import InvalidRequest

    if bool(keys) == (prompt is not None):
        raise InvalidRequest("blocks: name them by exactly one of --keys and --prompt")
    require_prompt(chat, prompt)
    if prompt is None:
        return _distinct([_key(text) for part in keys or () for text in _words(part, "--keys")])
    from moonpool.cluster.prompt_keys import prompt_keys
    from moonpool.cluster.store_control import StoreControl

    async def stores() -> StoreControl:
        async with await StoreControl.open(running.registry) as control:
            return control

    text = _file(prompt[1:], "--prompt") if prompt.startswith("@") else prompt
    return prompt_keys(running.config, list(asyncio.run(stores()).stores), text, chat=chat)


def require_prompt(chat: bool, prompt: str | None) -> None:
    """InvalidRequest where --chat has nothing to say."""
    from moonpool.core.errors import InvalidRequest

    if chat and prompt is None:
        raise InvalidRequest("--chat: it says how --prompt is meant, and there is none; give --prompt, or leave it out")


def _distinct(keys: list[bytes]) -> list[bytes]:
    from moonpool.core.errors import InvalidRequest

    if not keys:
        raise InvalidRequest("--keys: there is no key in it; give block keys in hex, or @FILE with one a line", param="--keys")
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None) if len(set(keys)) < len(keys) else None
    if twice is not None:
        raise InvalidRequest(f"--keys: {twice.hex()} is there twice; keys of a sequence differ", param="--keys")
    return keys


def _words(part: str, option: str) -> list[str]:
    return (_file(part[1:], option) if part.startswith("@") else part.replace(",", " ")).split()


def _file(path: str, option: str) -> str:
    from moonpool.core.errors import InvalidRequest

    if not path:
        raise InvalidRequest(f"{option}: no path follows the @; write {option} @FILE", param=option)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"{option}: cannot read {path}: {reason}; give a text file after @", param=option) from e


def _key(text: str) -> bytes:
    from moonpool.core.blocks import KEY_BYTES
    from moonpool.core.errors import InvalidRequest

    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"--keys: {text!r} is no block key; one has {2 * KEY_BYTES} hex digits", param="--keys")
    return key


def ask(running: Running, nodes: Sequence[str] | None, work: Callable[[StoreControl], Awaitable[T]]) -> T:
    from moonpool.cluster.store_control import StoreControl

    async def run() -> T:
        async with await StoreControl.open(running.registry, nodes or ()) as control:
            return await work(control)

    return asyncio.run(run())


def somebody_is_there() -> bool:
    return sys.stdin.isatty()


def change(
    running: Running,
    nodes: Sequence[str] | None,
    work: Callable[[StoreControl, bool], Awaitable[list[Reply]]],
    dry_run: bool,
    yes: bool,
    harmless: Callable[[list[Reply]], bool] = lambda plan: False,
) -> list[Reply]:
    """On a terminal the plan is shown and agreed to first, unless ``yes`` was given or it is ``harmless``."""
    if not dry_run and not yes and somebody_is_there():
        plan = ask(running, nodes, lambda control: work(control, True))
        if not harmless(plan):
            store_view.show(plan, as_json=False)
            typer.confirm("Do this?", abort=True, err=True)
    return ask(running, nodes, lambda control: work(control, dry_run))


def complete(copied: Reply) -> bool:
    return bool(copied.facts) and copied.facts["blocks"] == copied.facts["wanted"] != 0


def end(replies: Sequence[Reply], *, done: bool) -> None:
    if not done or any(reply.trouble for reply in replies):
        raise typer.Exit(1)
