"""Words in which processes tell more than one number at once. Pure.

They come from other processes: what cannot be read counts as nothing said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LANDED, RECENT = "landed_from", "recent"  # among the words of a store node, and of a gateway
MOST_WRITERS = 1_024  # told apart by a store node


def landed_from(words: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """(member that pushed, carrier) -> bytes, as a store node tells them."""
    found = {}
    for part in words.get(LANDED, "").split(" ", MOST_WRITERS):
        name, _, count = part.partition("=")
        writer, _, carrier = name.rpartition("/")
        if writer and carrier and count.isdecimal():
            found[writer, carrier] = int(count)
    return found


@dataclass(frozen=True, slots=True)
class Recent:
    """Of one gateway: how its newest answers went, and how many requests it refused since it started, by reason.

    Quantiles are (median, 90th percentile); None: nothing was answered within ``window_s``.
    """

    window_s: float = 0.0
    answers: int = 0
    ttft_ms: tuple[float, float] | None = None
    tbt_ms: tuple[float, float] | None = None
    refused: Mapping[str, int] = field(default_factory=dict)

    def word(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


NOTHING = Recent()


def recent_of(words: Mapping[str, str]) -> Recent:
    try:
        raw = json.loads(words.get(RECENT, "{}"))
        return Recent(
            float(raw.get("window_s", 0.0)),
            int(raw.get("answers", 0)),
            _pair(raw.get("ttft_ms")),
            _pair(raw.get("tbt_ms")),
            {str(reason): int(count) for reason, count in raw.get("refused", {}).items()},
        )
    except (ValueError, TypeError, AttributeError):
        return NOTHING


def _pair(raw: Any) -> tuple[float, float] | None:
    if raw is None:
        return None
    median, high = raw
    return float(median), float(high)
