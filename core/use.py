"""Who uses blocks, and in what kind of request: what eviction learns from, and what quotas and clearing go by."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Use:
    """Travels with every pin, reservation and landing. A hint but for ``tenant``: nothing is refused for its want.

    ``kind`` names a class of requests that come back alike (an application, an agent; empty: the tenant says it all),
    ``turn`` counts the requests of one conversation from 1, ``prompt_tokens`` is the whole prompt's length (0: unknown).
    """

    tenant: str = DEFAULT_TENANT
    kind: str = ""
    turn: int = 1
    prompt_tokens: int = 0
