"""A run on a time line: each strike with the time until everybody was back, and how requests ended above it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moonpool.bench.chaos.tally import End, Tally

COLOURS = {
    End.COMPLETED: "tab:green",
    End.CANCELLED: "tab:gray",
    End.REFUSED: "tab:orange",
    End.CUT: "tab:blue",
    End.BROKEN: "tab:purple",
    End.LOST: "black",
    End.WRONG: "red",
}


def draw(tally: Tally, seconds: float, path: Path) -> None:
    """Writes a PNG (or whatever the name's ending says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = sorted(tally.injected(), reverse=True)
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(min(60.0, 8 + seconds / 40), 4 + 0.22 * len(kinds)), height_ratios=[1, 2]
    )
    edges = np.arange(0.0, seconds + 2.0, 1.0)
    bottom = np.zeros(len(edges) - 1)
    for end, colour in COLOURS.items():
        counts, _ = np.histogram([one.ended_s for one in tally.ended if one.end is end], bins=edges)
        if counts.any():
            above.bar(edges[:-1], counts, width=1.0, align="edge", bottom=bottom, color=colour, label=end.value)
            bottom += counts
    above.set_ylabel("requests ended per second")
    above.legend(loc="upper right", ncols=len(COLOURS), fontsize="small")
    for one in tally.struck:
        row, healed = kinds.index(one.kind), one.healed_s if one.healed_s is not None else one.at_s
        below.plot([one.at_s], [row], "rx", markersize=5)
        below.hlines(row, one.at_s, healed, color="red", linewidth=4)
        if one.restored_s is not None:
            below.hlines(row, healed, one.restored_s, color="tab:orange", linewidth=4)
    below.set_yticks(range(len(kinds)), kinds, fontsize="small")
    below.set_xlabel("seconds of load; red: the fault holds, orange: until its targets are live and ready again")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
