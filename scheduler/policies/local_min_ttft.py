"""The smallest predicted TTFT with what every worker and its own node have: queued work against own cache, no fetch.

A strong router without a pool: most of what Mooncake (FAST 2025, fig. 10) shows between local and global caches is lost
against it.
"""

from __future__ import annotations

from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.costs import least
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policies.pairing import pair
from moonpool.scheduler.policy import Asked, Choice


class LocalMinTtft(Early):
    name = "local_min_ttft"

    def choose(self, asked: Asked) -> Choice | None:
        row = least(asked.local.ttft, asked.prefills, asked.board, tie=0.0)
        return None if row is None else pair(asked, row, decoder_for(asked, row))
