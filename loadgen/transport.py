"""Which carrier and which UCX transport the cluster says it really used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from moonpool.loadgen.summary import Transport

_DEPTH = 8
_USED = re.compile(r"([\w-]+) \(([^)]*)\)")


async def fetch_cluster(session: aiohttp.ClientSession) -> dict[str, Any] | None:
    """What ``GET /v1/cluster`` says; None where the server has no such page."""
    try:
        async with session.get("v1/cluster", timeout=aiohttp.ClientTimeout(total=10)) as response:
            value = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def transport_of(cluster: Mapping[str, Any] | None) -> Transport:
    """From the words of its members, wherever ``cluster`` has them.

    ``carriers`` is a sender's list of what it used, as in ``ucx (tcp), segment (mmap)``; where no member has one, ``carrier``
    and ``ucx_transport`` of a receiver stand in.
    """
    words: dict[str, set[str]] = {"carriers": set(), "carrier": set(), "ucx_transport": set()}
    if cluster is not None:
        _collect(cluster, words, _DEPTH)
    used = [match.groups() for part in words["carriers"] if (match := _USED.match(part))]
    carriers = {name for name, _ in used} or words["carrier"]
    transports = {transport for name, transport in used if name == "ucx"} or words["ucx_transport"]
    return Transport(_listed(carriers), _listed(transports))


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(n for n in names if n != "unknown")) or "unknown"


def _collect(value: Any, words: dict[str, set[str]], depth: int) -> None:
    if depth == 0:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in words and isinstance(inner, str):
                words[name].update(part.strip() for part in inner.split(",") if part.strip())
            else:
                _collect(inner, words, depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, words, depth - 1)
