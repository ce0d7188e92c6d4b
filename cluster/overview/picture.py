"""The cluster in one picture, from what its processes said at two moments. Pure.

Rates are differences of counters between the two looks; a process that began a new life meanwhile counts from zero, one that
was not there at the first look has no rates yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from moonpool.cluster.overview.told import landed_from, recent_of
from moonpool.cluster.survey import Answer, leaders_of
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness

CARRIER = "bytes_landed_"
SOURCES = ("device", "pool", "remote", "computed")  # where the KV of a prompt's tokens came from
TIERS = ("dram", "ssd", "shared")  # of a host's pool
WORKERS = (Role.PREFILL, Role.DECODE, Role.BOTH)
SLOTS = ("sealed", "reserved", "fenced", "free")

K = TypeVar("K")
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Look:
    """``at`` in seconds of one monotonic clock."""

    at: float
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class MemberLine:
    """``note``: why it does not answer, or is not live. ``leads``: the term of a leading conductor, else 0."""

    id: str
    role: str
    node: str
    model: str
    state: str  # live, silent, gone
    ready: bool
    life: str  # a number too large for readers of JSON
    leads: int
    version: str
    note: str


@dataclass(frozen=True, slots=True)
class PoolLine:
    """One store node. Bytes are of DRAM; ``slots`` by state; ``ssd_share`` is None without an SSD tier."""

    id: str
    node: str
    bytes: int
    used_share: float
    slots: Mapping[str, int]
    pins: int
    blocks: int
    blocks_on_ssd: int
    ssd_share: float | None


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """``speed``: tokens per second, computed prompt tokens at a prefill worker, generated ones elsewhere; None: unknown yet."""

    id: str
    node: str
    role: str
    waiting: int
    running: int
    filling: int
    pages: int
    pages_used: int
    pages_cached: int
    speed: float | None


@dataclass(frozen=True, slots=True)
class GatewayLine:
    """Quantiles are over the answers of the last ``window_s``; None: there were none."""

    id: str
    in_flight: int
    connections: int
    ttft_ms: tuple[float, float] | None  # median and 90th percentile
    tbt_ms: tuple[float, float] | None
    answers: int
    window_s: float


@dataclass(frozen=True, slots=True)
class ConductorLine:
    id: str
    leads: int
    waiting: int
    bookings: int
    placed: float | None  # per second


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of KV that landed, by carrier. ``source`` and ``target`` are nodes; empty: all of them together."""

    carrier: str
    bytes: int
    rate: float | None  # bytes per second
    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of prompts by where their KV came from, between the looks; since the start where there were none."""

    name: str
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    count: int
    rate: float | None


@dataclass(frozen=True, slots=True)
class Picture:
    """``seconds`` between the looks; 0: there is one only, and nothing has a rate."""

    seconds: float
    in_flight: int = 0
    waiting: int = 0
    output_rate: float | None = None  # tokens per second
    prompt_rate: float | None = None
    members: tuple[MemberLine, ...] = ()
    pools: tuple[PoolLine, ...] = ()
    workers: tuple[WorkerLine, ...] = ()
    gateways: tuple[GatewayLine, ...] = ()
    conductors: tuple[ConductorLine, ...] = ()
    carriers: tuple[Flow, ...] = ()
    links: tuple[Flow, ...] = ()
    sources: tuple[Share, ...] = ()
    tiers: tuple[Share, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    models: tuple[str, ...] = field(default=())

    @property
    def live(self) -> int:
        return sum(member.state == Liveness.LIVE.value for member in self.members)

    @property
    def hit_share(self) -> float | None:
        """Of prompt tokens, those that were not computed."""
        computed = next((s for s in self.sources if s.name == "computed"), None)
        return None if computed is None else 1.0 - computed.share


class _Rates:
    def __init__(self, before: Look | None, now: Look) -> None:
        self.seconds = max(now.at - before.at, 0.0) if before is not None else 0.0
        self._before = {} if before is None else {a.change.member.id: a for a in before.answers if a.numbers}

    def grown(self, answer: Answer, counts: Callable[[Answer], Mapping[K, float]]) -> dict[K, float] | None:
        """How much each counter grew between the looks; None: unknown."""
        was = self._before.get(answer.change.member.id)
        if was is None or not answer.numbers or self.seconds <= 0.0:
            return None
        now, then = counts(answer), counts(was)
        anew = was.change.member.incarnation != answer.change.member.incarnation
        more = {key: value - then.get(key, 0.0) for key, value in now.items()}
        return {key: now[key] if anew or value < 0 else value for key, value in more.items()}

    def per_s(self, answer: Answer, *names: str) -> float | None:
        grown = self.grown(answer, lambda a: {"": sum(a.numbers.get(name, 0.0) for name in names)})
        return None if grown is None else grown[""] / self.seconds

    def tally(
        self, answers: Iterable[Answer], counts: Callable[[Answer], Mapping[K, float]], named: Callable[[Answer, K], N]
    ) -> list[tuple[N, int, float | None]]:
        """(name, count, rate per second) of all together, the largest count first; no rate where no growth is known."""
        total: Counter[N] = Counter()
        more: dict[N, float] = {}
        for answer in answers:
            grown = self.grown(answer, counts) or {}
            for key, count in counts(answer).items():
                name = named(answer, key)
                total[name] += int(count)
                if key in grown:
                    more[name] = more.get(name, 0.0) + grown[key]
        return [(name, count, more[name] / self.seconds if name in more else None) for name, count in total.most_common()]


def picture(before: Look | None, now: Look) -> Picture:
    """``before`` None: what can be said from one look."""
    rates, said = _Rates(before, now), [answer for answer in now.answers if answer.numbers]
    of = {role: [a for a in said if a.change.member.role is role] for role in Role}
    stores, workers = of[Role.STORE], [a for role in WORKERS for a in of[role]]
    leading = {one.id for one in leaders_of(list(now.answers)).values()}
    answering = [*of[Role.DECODE], *of[Role.BOTH]]
    return Picture(
        rates.seconds,
        sum(_int(a, "requests_in_flight") for a in of[Role.GATEWAY]),
        sum(_int(a, "waiting") for a in of[Role.CONDUCTOR]),
        _sum(rates.per_s(a, "tokens_count") for a in answering),
        _sum(rates.per_s(a, *(f"prefix_tokens_{source}_count" for source in SOURCES)) for a in workers),
        tuple(_member(a) for a in now.answers),
        tuple(_pool(a) for a in stores),
        tuple(_worker(a, rates) for a in workers),
        tuple(_gateway(a) for a in of[Role.GATEWAY]),
        tuple(_conductor(a, a.change.member.id in leading, rates) for a in of[Role.CONDUCTOR]),
        tuple(_carriers(stores, rates)),
        tuple(_links(stores, now.answers, rates)),
        _shares(workers, SOURCES, rates),
        _shares(stores, TIERS, rates),
        tuple(_refusals(of[Role.GATEWAY], rates)),
        tuple(sorted({a.change.member.model for a in now.answers if a.change.member.model})),
    )


def _int(answer: Answer, name: str) -> int:
    return int(answer.numbers.get(name, 0.0))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _member(answer: Answer) -> MemberLine:
    change, member = answer.change, answer.change.member
    live = change.liveness is Liveness.LIVE
    return MemberLine(
        member.id,
        member.role.value,
        member.node,
        member.model,
        change.liveness.value,
        member.ready and live,
        str(int(member.incarnation)),
        member.term if live else 0,
        member.version,
        answer.trouble or ("" if live else change.proof),
    )


def _pool(answer: Answer) -> PoolLine:
    numbers, member = answer.numbers, answer.change.member
    total, free = numbers.get("pool_bytes", 0.0), numbers.get("pool_free_bytes", 0.0)
    used, blank = numbers.get("ssd_extents"), numbers.get("ssd_extents_free", 0.0)
    return PoolLine(
        member.id,
        member.node,
        int(total),
        1.0 - free / total if total else 0.0,
        {state: _int(answer, f"slots_{state}") for state in SLOTS},
        _int(answer, "pins"),
        _int(answer, "blocks_findable"),
        _int(answer, "blocks_on_ssd"),
        None if used is None else used / max(used + blank, 1.0),
    )


def _worker(answer: Answer, rates: _Rates) -> WorkerLine:
    member = answer.change.member
    computing = member.role is Role.PREFILL
    return WorkerLine(
        member.id,
        member.node,
        member.role.value,
        _int(answer, "requests_waiting"),
        _int(answer, "requests_running"),
        _int(answer, "requests_filling") or _int(answer, "requests_draining"),
        _int(answer, "pages_total"),
        _int(answer, "pages_used"),
        _int(answer, "pages_cached"),
        rates.per_s(answer, "prefix_tokens_computed_count" if computing else "tokens_count"),
    )


def _gateway(answer: Answer) -> GatewayLine:
    recent = recent_of(answer.words)
    return GatewayLine(
        answer.change.member.id,
        _int(answer, "requests_in_flight"),
        _int(answer, "connections"),
        recent.ttft_ms,
        recent.tbt_ms,
        recent.answers,
        recent.window_s,
    )


def _conductor(answer: Answer, leads: bool, rates: _Rates) -> ConductorLine:
    member = answer.change.member
    placed = rates.per_s(answer, "placements")
    return ConductorLine(member.id, member.term if leads else 0, _int(answer, "waiting"), _int(answer, "bookings"), placed)


def _carriers(stores: list[Answer], rates: _Rates) -> Iterable[Flow]:
    names = sorted({name for answer in stores for name in answer.numbers if name.startswith(CARRIER)})
    for name in names:
        rate = _sum(rates.per_s(answer, name) for answer in stores)
        yield Flow(name.removeprefix(CARRIER), sum(_int(answer, name) for answer in stores), rate)


def _links(stores: list[Answer], everybody: Iterable[Answer], rates: _Rates) -> Iterable[Flow]:
    """From node to node, the busiest first. Writers that nobody knows any more are on no node."""
    nodes: dict[str, str] = {answer.change.member.id: answer.change.member.node for answer in everybody}

    def link(store: Answer, pushed: tuple[str, str]) -> tuple[str, str, str]:
        writer, carrier = pushed
        return nodes.get(writer, ""), store.change.member.node, carrier

    for (source, target, carrier), count, rate in rates.tally(stores, lambda a: landed_from(a.words), link):
        yield Flow(carrier, count, rate, source, target)


def _shares(answers: list[Answer], names: tuple[str, ...], rates: _Rates) -> tuple[Share, ...]:
    def tokens(answer: Answer) -> dict[str, float]:
        return {name: answer.numbers.get(f"prefix_tokens_{name}_count", 0.0) for name in names}

    grown = [rates.grown(answer, tokens) or {} for answer in answers]
    lately = {name: sum(one.get(name, 0.0) for one in grown) for name in names}
    counted = lately if any(lately.values()) else {name: sum(tokens(a)[name] for a in answers) for name in names}
    whole = sum(counted.values())
    return tuple(Share(name, int(count), count / whole) for name, count in counted.items()) if whole else ()


def _refusals(gateways: list[Answer], rates: _Rates) -> Iterable[Refusal]:
    """As clients saw them, whoever refused: the most frequent first."""
    return (Refusal(*one) for one in rates.tally(gateways, lambda a: recent_of(a.words).refused, lambda _, reason: reason))
