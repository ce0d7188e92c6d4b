"""OpenAI-compatible HTTP in front of the cluster. ``Gateway`` is loaded when asked for: it pulls in a web server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.cluster.gateway.service import Gateway

__all__ = ["Gateway"]


def __getattr__(name: str) -> object:
    if name == "Gateway":
        from moonpool.cluster.gateway.service import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
