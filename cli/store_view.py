"""How ``moonpool store`` prints: a table on a terminal, aligned plain text elsewhere, one JSON document where asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moonpool.cli.options import say

if TYPE_CHECKING:
    from moonpool.cluster.store_events import Line
    from moonpool.cluster.store_replies import Facts, Reply

SIZES = frozenset({"bytes", "used", "quota", "soft", "hard", "above", "before", "bytes_before", "bytes_after"})
QUOTAS = frozenset({"quota", "before"})
MAIN = (
    "blocks_findable",
    "blocks_on_ssd",
    "pool_bytes",
    "pool_free_bytes",
    "pool_evictable_bytes",
    "pins",
    "held_soft_blocks",
    "held_hard_blocks",
    "slots_fenced",
    "landings_open",
    "digest_mismatches",
)
SHOWN_KEYS = 3
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show(replies: Sequence[Reply], as_json: bool, *, rows: bool = False) -> None:
    """One line a node with its facts; with ``rows`` one line a row instead. Troubles go to standard error as well."""
    if as_json:
        print(json.dumps([reply.to_json() for reply in replies], indent=2))
    else:
        facts = [{"node": r.node, **one} for r in replies for one in (r.rows if rows else [r.facts] if r.facts else [])]
        if facts:
            table(facts)
    for reply in replies:
        if reply.trouble:
            say(f"moonpool: node {reply.node}: {reply.trouble}")


def table(facts: Sequence[Facts]) -> None:
    columns = list(dict.fromkeys(name for one in facts for name in one))
    cells = [[_text(name, one.get(name, "")) for name in columns] for one in facts]
    if sys.stdout.isatty():
        _rich(columns, cells)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rich(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="left" if column in ("node", "key", "tenant", "tiers") else "right", no_wrap=True)
    for line in cells:
        shown.add_row(*line)
    Console().print(shown)


def _text(name: str, value: int | float | str) -> str:
    if name in QUOTAS and not value:
        return "none"
    if (name in SIZES or name.endswith("_bytes") or name.startswith("bytes_")) and isinstance(value, int | float):
        return size(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def size(value: int) -> str:
    """Bytes in words that ``store.quotas`` and ``--bytes`` would read, to three digits or whole."""
    for unit, factor in UNITS:
        if value >= factor:
            number = value / factor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{value} B"


def words(line: Line) -> str:
    """One event: node, what happened, where, how many blocks, the first of their keys."""
    if line.what == "missed":
        return f"-- {line.count} lines were missed: they came faster than they were read"
    if not line.tier:
        return f"{line.node:<8} {line.what}"
    names = " ".join(key.hex() for key in line.keys[:SHOWN_KEYS]) + (" ..." if len(line.keys) > SHOWN_KEYS else "")
    return (
        f"{line.node:<8} {line.what:<8} {line.tier}  {line.count} {'block' if line.count == 1 else 'blocks'}  {names}".rstrip()
    )


def stats(replies: Sequence[Reply], as_json: bool, full: bool) -> None:
    """A table of the main figures; with ``full`` every number and word, a node after the other."""
    if as_json or not full:
        main = [replace(r, facts={name: r.facts[name] for name in MAIN if name in r.facts}) for r in replies]
        show(replies if as_json else main, as_json)
        if not as_json and any(r.rows for r in replies):
            print()
            show(replies, as_json, rows=True)
        return
    for reply in replies:
        for name, value in sorted(reply.facts.items()):
            print(f"{reply.node:<8} {name:<32} {_text(name, value)}")
    show([r for r in replies if r.trouble], as_json)
