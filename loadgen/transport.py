"""Which carrier and which UCX transport the cluster says it really used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from moonpool.loadgen.summary import Transport

_DEPTH = 8


async def fetch_cluster(session: aiohttp.ClientSession) -> dict[str, Any] | None:
    """What ``GET /v1/cluster`` says; None where the server has no such page."""
    try:
        async with session.get("v1/cluster", timeout=aiohttp.ClientTimeout(total=10)) as response:
            value = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def transport_of(cluster: Mapping[str, Any] | None) -> Transport:
    """Every value of ``carrier`` and ``ucx_transport`` found in ``cluster``, wherever its members put them."""
    found: dict[str, set[str]] = {"carrier": set(), "ucx_transport": set()}
    if cluster is not None:
        _collect(cluster, found, _DEPTH)
    return Transport(*(", ".join(sorted(found[name])) or "unknown" for name in ("carrier", "ucx_transport")))


def _collect(value: Any, found: dict[str, set[str]], depth: int) -> None:
    if depth == 0:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in found and isinstance(inner, str):
                found[name].update(part.strip() for part in inner.split(",") if part.strip())
            else:
                _collect(inner, found, depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, found, depth - 1)
