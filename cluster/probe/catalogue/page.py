"""The tables of docs/metrics.md: ``python -m moonpool.cluster.probe.catalogue.page docs/metrics.md`` writes them anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moonpool.cluster.probe.catalogue.declared import DECLARED, table

_TABLE = re.compile(r"(?<=<!-- metrics of )(\w+)( -->\n)(?:\n?\|.*)*\n?")


def with_tables(text: str) -> str:
    """``text`` with the table of each part after its mark, as the code declares it. KeyError: a mark of no part."""
    missing = DECLARED.keys() - {match[1] for match in _TABLE.finditer(text)}
    if missing:
        raise KeyError(f"no place for the metrics of {', '.join(sorted(missing))}")
    return _TABLE.sub(lambda match: f"{match[1]}{match[2]}\n{table(match[1])}\n", text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
