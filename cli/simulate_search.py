"""``moonpool simulate --search``: the cheapest split of nodes that keeps a share of requests inside the targets."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from moonpool.cli.options import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.loadgen.trace import TraceRow
    from moonpool.sim.cluster import SimCluster
    from moonpool.sim.search import Goal, Makers, Tried


def search(rows: Sequence[TraceRow], machines: SimCluster, makers: Makers, goal: Goal, *, nodes: int, as_json: bool) -> None:
    """``nodes``: the best split of so many instead; 0: as few as do."""
    from moonpool.sim.search import Search

    work = Search(rows, machines, makers, goal, on_try=_told)
    found = work.best_split(nodes) if nodes else work.cheapest()
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    targets = machines.targets
    print(
        f"{found.prefill} prefill and {found.decode} decode nodes: {found.share:.2%} of requests inside "
        f"TTFT {targets.ttft_s:g} s and TBT {targets.tbt_s:g} s; cost {found.cost:g}, {len(found.tried)} simulations"
    )


def _told(tried: Tried) -> None:
    most = "at most " if tried.pruned else ""
    verdict = "enough" if tried.suffices else "too little"
    say(f"{tried.prefill} prefill, {tried.decode} decode: {most}{tried.share:.2%} inside the targets, {verdict}")
