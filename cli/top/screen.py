"""A picture of the cluster as lines of a terminal. Pure: the same picture and size give the same lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from moonpool.cluster.overview.picture import Flow, Picture, PoolLine, Share, WorkerLine

NARROWEST = 40
WIDE = 120  # from here on there is room for more columns
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_STATES = {"live": "green", "silent": "yellow", "gone": "red"}


def screen(picture: Picture, name: str, width: int, height: int) -> list[Text]:
    """At most ``height`` lines (0: any number) of at most ``width`` columns; the last one counts those that have no room."""
    width = max(width, NARROWEST)
    lines = [_cut(line, width) for line in _lines(picture, name, width)]
    if 0 < height < len(lines):
        left = len(lines) - height + 1
        return [*lines[: height - 1], Text(f"... {left} more lines: a taller terminal shows them", style="dim")]
    return lines


def _lines(picture: Picture, name: str, width: int) -> Iterator[Text]:
    yield from _head(picture, name, width)
    yield from _section("POOL", _pools(picture.pools, width))
    yield from _section("WORKER", _workers(picture.workers, width))
    yield from _section("KV", _flows(picture, width))
    yield from _section("GATEWAY", _gateways(picture))
    yield from _section("CONDUCTOR", _conductors(picture))
    yield from _trouble(picture)


def _section(title: str, lines: Iterable[Text]) -> Iterator[Text]:
    """Its first line is its heads; without any other there is no section."""
    found = list(lines)
    if len(found) > 1:
        heads, *rest = found
        yield Text("")
        yield Text(f"{title:<14}", style="bold") + heads
        yield from rest


def _head(picture: Picture, name: str, width: int) -> Iterator[Text]:
    models = ", ".join(picture.models)
    live = f"{picture.live} of {len(picture.members)} live"
    left = f"moonpool {name}" + (f"  {models}" if models else "")
    yield Text(left[: width - len(live) - 2].ljust(width - len(live)) + live, style="bold")
    parts = [
        f"{picture.in_flight} in flight",
        f"{picture.waiting} waiting",
        f"out {rate(picture.output_rate, 'tok/s')}",
        f"in {rate(picture.prompt_rate, 'tok/s')}",
        f"hits {share(picture.hit_share)}",
    ]
    yield Text("  ".join(parts))
    yield Text("prompts  " + (_shares(picture.sources) or "none yet"))
    if tiers := _shares([one for one in picture.tiers if one.share > 0]):
        yield Text("pools    " + tiers)
    if picture.refusals:
        told = (f"{one.reason} {one.count}" + (f" ({rate(one.rate, '/s')})" if one.rate else "") for one in picture.refusals)
        yield Text("refused  " + "  ".join(told), style="yellow")


def _shares(shares: Sequence[Share]) -> str:
    return "  ".join(f"{one.name} {share(one.share)}" for one in shares)


def _pools(pools: Sequence[PoolLine], width: int) -> Iterator[Text]:
    bar = _bar_width(width, 61)
    more = "  LANDING" if width >= WIDE else ""
    yield Text(f"{'NODE':<6}{'USED':<{bar + 8}}{'OF':>9}{'BLOCKS':>8}{'PINS':>6}{'FENCED':>8}{more}", style="dim")
    for pool in pools:
        line = Text(f"{pool.id[:13]:<14}{pool.node[:5]:<6}")
        line.append_text(_bar(pool.used_share, bar, "magenta"))
        line.append(f" {share(pool.used_share):>6} {size(pool.bytes):>9}{pool.blocks:>8}{pool.pins:>6}")
        line.append(f"{pool.slots.get('fenced', 0):>8}", style="red" if pool.slots.get("fenced") else "")
        if width >= WIDE:
            line.append(f"{pool.slots.get('reserved', 0):>9}")
        yield line
        if pool.ssd_share is not None:
            yield (
                Text(f"{'':<20}")
                + _bar(pool.ssd_share, bar, "blue")
                + Text(f" {share(pool.ssd_share):>6} of SSD, {pool.blocks_on_ssd} blocks")
            )


def _workers(workers: Sequence[WorkerLine], width: int) -> Iterator[Text]:
    bar = _bar_width(width, 62)
    more = "  CACHED PAGES" if width >= WIDE else ""
    yield Text(f"{'NODE':<6}{'WAIT':>5}{'RUN':>5}  {'PAGES':<{bar + 8}}{'SPEED':>16}{more}", style="dim")
    for one in workers:
        style = {"prefill": "yellow", "decode": "cyan", "both": "green"}.get(one.role, "")
        line = Text(f"{one.id[:13]:<14}{one.node[:5]:<6}{one.waiting:>5}{one.running:>5}  ")
        used = one.pages_used / one.pages if one.pages else 0.0
        line.append_text(_bar(used, bar, style))
        line.append(f" {share(used):>6} {rate(one.speed, 'tok/s'):>16}")
        if width >= WIDE:
            line.append(f"{one.pages_cached:>8} of {one.pages}")
        yield line


def _flows(picture: Picture, width: int) -> Iterator[Text]:
    yield Text(f"{'NOW':>12}{'IN ALL':>12}  BUSIEST", style="dim")
    for flow in picture.carriers:
        links = [one for one in picture.links if one.carrier == flow.carrier and one.source != one.target]
        busiest = "  ".join(f"{_way(one)} {transfer(one.rate)}" for one in links[: 4 if width >= WIDE else 2])
        yield Text(f"{flow.carrier[:13]:<14}{transfer(flow.rate):>12}{size(flow.bytes):>12}  {busiest}")


def _way(link: Flow) -> str:
    return f"{link.source or '?'} > {link.target}"


def _gateways(picture: Picture) -> Iterator[Text]:
    yield Text(f"{'FLIGHT':>7}{'ANSWERS':>9}   {'TTFT p50':>9}{'p90':>9}   {'TBT p50':>9}{'p90':>9}", style="dim")
    for one in picture.gateways:
        ttft, tbt = ((f"{ms(v[0]):>9}{ms(v[1]):>9}" if v else f"{'-':>9}{'-':>9}") for v in (one.ttft_ms, one.tbt_ms))
        yield Text(f"{one.id[:13]:<14}{one.in_flight:>7}{one.answers:>9}   {ttft}   {tbt}")


def _conductors(picture: Picture) -> Iterator[Text]:
    yield Text(f"{'WAITING':>7}{'BOOKED':>9}   {'PLACED':>9}", style="dim")
    for one in picture.conductors:
        line = Text(f"{one.id[:13]:<14}{one.waiting:>7}{one.bookings:>9}   {rate(one.placed, '/s'):>9}")
        if one.leads:
            line.append(f"   leads, term {one.leads}", style="bold")
        yield line


def _trouble(picture: Picture) -> Iterator[Text]:
    """Members that are not live, not ready, or do not answer."""
    odd = [one for one in picture.members if one.state != "live" or not one.ready or one.note]
    for number, one in enumerate(odd):
        if not number:
            yield Text("")
        state = one.state if one.state != "live" else "ready" if one.ready else "not ready"
        line = Text(f"{one.id[:13]:<14}")
        line.append(f"{state:<10}", style=_STATES.get(one.state, "yellow"))
        yield line + Text(one.note)


def _bar_width(width: int, taken: int) -> int:
    return max(6, min(40, width - taken))


def _bar(part: float, width: int, style: str) -> Text:
    filled = round(max(0.0, min(1.0, part)) * width)
    return Text.assemble(("#" * filled, style), ("." * (width - filled), "dim"))


def _cut(line: Text, width: int) -> Text:
    line.truncate(width)
    line.rstrip()
    return line


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def rate(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    number = f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
    return f"{number}{'' if unit.startswith('/') else ' '}{unit}"


def transfer(value: float | None) -> str:
    return "-" if value is None else _scaled(value, _RATES, 1_000.0)


def size(value: float) -> str:
    return _scaled(value, _UNITS, 1_024.0)


def _scaled(value: float, units: Sequence[str], base: float) -> str:
    step = 0
    while value >= base and step < len(units) - 1:
        value, step = value / base, step + 1
    return f"{value:.0f} {units[step]}" if not step or value >= 100 else f"{value:.1f} {units[step]}"


def ms(value: float) -> str:
    return f"{value / 1e3:.1f} s" if value >= 10_000 else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
