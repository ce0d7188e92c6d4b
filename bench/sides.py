"""Two sides measured in turns: which goes first, and what becomes of their samples. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Samples = dict[str, list[float]]

_CACHED = "_cached_"  # counts of tokens, of which no ratio says anything
_UNIT = re.compile(r"_(ms|s|bytes)\Z")


def ours_first(turn: int) -> bool:
    """Ours, theirs, theirs, ours, ...: whoever is first in a turn was second in the one before."""
    return turn % 2 == 0


def ratio_name(figure: str) -> str:
    """``ttft_512_ms`` -> ``ttft_512_vs_peer``: units cancel."""
    return f"{_UNIT.sub('', figure)}_vs_peer"


def ratio(ours: float, theirs: float) -> float | None:
    """Ours over theirs; None where theirs is zero."""
    return ours / theirs if theirs else None


def compared(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of every figure that both sides have: ``F``, ``peer_F`` (medians), ``F_vs_peer``; what only we have: ``F``.

    ``spread`` holds [least, most] of each, for a ratio over the turns: turn i is sample i of both sides.
    """
    out: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    for name, mine in ours.items():
        out[name], spread[name] = statistics.median(mine), [min(mine), max(mine)]
        other = theirs.get(name)
        if not other:
            continue
        out[f"peer_{name}"], spread[f"peer_{name}"] = statistics.median(other), [min(other), max(other)]
        if _CACHED in name:
            continue
        out[ratio_name(name)] = ratio(statistics.median(mine), statistics.median(other))
        turns = [each for a, b in zip(mine, other, strict=False) if (each := ratio(a, b)) is not None]
        if turns:
            spread[ratio_name(name)] = [min(turns), max(turns)]
    return {**out, "spread": spread}


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
