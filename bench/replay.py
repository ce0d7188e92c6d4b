"""``moonpool bench replay --peer-python PATH``: one slice of a conversation trace on our cluster and on vLLM's CPU server.

Open loop over HTTP, streamed, prompts as token ids (bench.replay_plan says how the trace becomes a plan for this machine).
One side is up at a time, on all cores, with the same memory for KV; sides take turns, and whoever is first changes from round
to round. In a round both get the same prompts; every round and rate has prompts of its own. The peer's chunk budget is the
one of 512, 1,024 and 2,048 that serves the first fifth of the slice best at the highest rate, unless it is given.
Our requests carry the targets in headers, so that the cluster may refuse what it could only answer late (``targets_sent``);
the peer knows no targets. A refused request met none.

Keys, ours over theirs, over all rounds (``spread``: least and most over the rounds), for rates 0.62 and 0.94:

    goodput_062_vs_peer, goodput_094_vs_peer     requests per second with TTFT at most 4 s and TPOT at most 0.2 s
    slo_prompt_tokens_vs_peer                    prompt tokens of these requests: the lower of the rates' ratios
    goodput_062, peer_goodput_062, slo_share_062, slo_prompt_tokens_062_vs_peer, ...
    rounds                        {"ours"|"peer": {rate: [one verdict per round]}}: counts, refusals, share in targets,
                                  goodput, p50/p90/p99 of TTFT and TPOT of answered requests, cached share; see bench.slo
    peer, peer_facts, peer_budgets, engines, startup_s, peer_startup_s, settings, machine, interrupted, picture

Ctrl-C or SIGTERM ends the run that is under way; what whole rounds gave is still printed, with ``interrupted`` true.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.bench.asking import AskingClient
from moonpool.bench.local_cluster import local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.our_side import engines_of, nodes_of, our_settings
from moonpool.bench.replay_picture import draw_replays
from moonpool.bench.replay_plan import plan_at
from moonpool.bench.sides import ours_first
from moonpool.bench.slo import Slo, Verdict, as_json, compared_verdicts, judge
from moonpool.bench.vllm_side import BUDGETS, PeerSettings, peer_version, vllm_server
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.core.request import Targets
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import RequestRecord
from moonpool.loadgen.replay import Replay, RequestShape
from moonpool.loadgen.trace import Trace, read_trace

TRACE = "conversation_trace.jsonl.gz"
_CHOICE_SHARE = 5  # one in so many requests of the slice chooses the budget
_PEER_START_S, _OUR_START_S, _DRAIN_S = 70.0, 15.0, 40.0  # for the estimate alone
_TIMEOUT_S = 900.0
_REPORT_S = 10.0
_SETTLE_S = 2.0  # between two runs on one server
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``kv_gib``: memory for KV of either side. ``chunk_budget`` 0: the best is looked for. ``out`` None: no files."""

    peer_python: str
    trace: Path | None = None
    requests: int = 200
    rounds: int = 3
    rates: tuple[float, ...] = (0.62, 0.94)
    roles: str = "both"
    model: str = "smollm2"
    engine: str = "auto"
    chunk_budget: int = 0
    kv_gib: int = 4
    send_targets: bool = True
    slo: Slo = field(default_factory=Slo)
    out: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        for name, value, least in (("requests", self.requests, 10), ("rounds", self.rounds, 1), ("kv", self.kv_gib, 1)):
            if value < least:
                raise ConfigError(f"{name}: {value} is too few; use {least} or more", param=name)
        if self.chunk_budget < 0:
            raise ConfigError(f"chunk-budget: {self.chunk_budget} is out of range; use 0 or more", param="chunk_budget")
        if not self.rates or min(self.rates) <= 0:
            raise ConfigError("rate: requests per second are above 0", param="rate")

    def trace_file(self) -> Path:
        """ConfigError where none is named."""
        if self.trace is not None:
            return self.trace
        folder = os.environ.get("MOONPOOL_TRACES")
        if not folder:
            raise ConfigError(f"trace: give --trace FILE, or the folder of {TRACE} as MOONPOOL_TRACES", param="trace")
        return Path(folder) / TRACE

    def estimate_s(self) -> float:
        replays = sum(self.requests / rate + _DRAIN_S for rate in self.rates)
        choice = _PEER_START_S + self.requests / _CHOICE_SHARE / max(self.rates) + _DRAIN_S
        once = 0.0 if self.chunk_budget else len(BUDGETS) * choice
        return once + self.rounds * (_PEER_START_S + _OUR_START_S + 2 * replays)


@dataclass(slots=True)
class _Found:
    """What whole runs gave so far, by side and rate."""

    records: dict[str, dict[float, list[list[RequestRecord]]]]
    verdicts: dict[str, dict[float, list[Verdict]]]
    startups: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})
    engines: dict[str, str] = field(default_factory=dict)
    peer_facts: dict[str, Any] = field(default_factory=dict)
    budgets: dict[int, Verdict] = field(default_factory=dict)
    interrupted: bool = False

    @classmethod
    def nothing(cls, rates: tuple[float, ...]) -> _Found:
        return cls(
            {side: {rate: [] for rate in rates} for side in ("ours", "peer")},
            {side: {rate: [] for rate in rates} for side in ("ours", "peer")},
        )


def replay(options: ReplayOptions, say: Say) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options or trace, or a side that does not start or answer."""
    options.check()
    python = Path(options.peer_python).expanduser()
    version = peer_version(python)
    trace = read_trace(options.trace_file())
    nodes = nodes_of(options.roles)
    settings = our_settings(nodes, options.kv_gib << 30, options.engine, options.settings)
    model_dir = local_model(options.model, say)
    say(f"this takes about {options.estimate_s() / 60 + 1:.0f} minutes")
    machine, found = machine_facts(), _Found.nothing(options.rates)
    run = _Run(options, trace, nodes, settings, model_dir, found, say)
    try:
        run.all_rounds(python)
    except (KeyboardInterrupt, SystemExit):
        found.interrupted = True
        say("interrupted: the figures are of what was whole")
    result = {
        "requests": options.requests, "roles": options.roles, "model": options.model, "engine": options.engine,
        "dtype": "bfloat16", "kv_bytes": options.kv_gib << 30, "targets_sent": options.send_targets,
        "slo_ttft_s": options.slo.ttft_s, "slo_tpot_s": options.slo.tpot_s, "settings": settings, "machine": machine,
        "peer": version, "peer_python": str(python), "peer_facts": found.peer_facts,
        "engines": found.engines,
        "peer_budgets": as_json({float(budget): [verdict] for budget, verdict in found.budgets.items()}),
        "startup_s": found.startups["ours"], "peer_startup_s": found.startups["peer"], "interrupted": found.interrupted,
        **compared_verdicts(found.verdicts["ours"], found.verdicts["peer"]),
        "rounds": {side: as_json(verdicts) for side, verdicts in found.verdicts.items()},
    }  # fmt: skip
    if options.out is not None:
        result["picture"] = str(draw_replays(options.out / "replay.png", found.records, options.slo))
        (options.out / "replay.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


@dataclass(slots=True)
class _Run:
    options: ReplayOptions
    trace: Trace
    nodes: str
    settings: dict[str, str]
    model_dir: Path
    found: _Found
    say: Say

    def all_rounds(self, python: Path) -> None:
        peer = PeerSettings(python, self.options.chunk_budget or self.best_budget(python), self.options.kv_gib)
        for turn in range(self.options.rounds):
            for side in ("ours", "peer") if ours_first(turn) else ("peer", "ours"):
                with self.ours() if side == "ours" else self.theirs(peer) as url:
                    for at, rate in enumerate(self.options.rates):
                        self.say(f"round {turn + 1} of {self.options.rounds}: {side} at {rate:g} requests/s")
                        records, verdict = self.one(url, rate, salt=1 + turn * len(self.options.rates) + at, side=side)
                        self.found.records[side][rate].append(records)
                        self.found.verdicts[side][rate].append(verdict)
                        self.say(words_of(verdict))
                        time.sleep(_SETTLE_S)

    @contextmanager
    def ours(self) -> Iterator[str]:
        began = time.monotonic()
        with local_cluster(self.nodes, self.model_dir, self.settings) as cluster:
            asyncio.run(_warm(cluster.url))
            self.found.engines = asyncio.run(engines_of(cluster))
            self.found.startups["ours"].append(time.monotonic() - began)
            yield cluster.url

    @contextmanager
    def theirs(self, settings: PeerSettings) -> Iterator[str]:
        with vllm_server(settings, self.model_dir, self.say) as peer:
            asyncio.run(_warm(peer.url))
            self.found.startups["peer"].append(peer.startup_s)
            self.found.peer_facts = peer.facts()
            yield peer.url

    def best_budget(self, python: Path) -> int:
        """The one with which most requests met their targets; among equals the one with the lowest p90 of TTFT."""
        requests, rate = max(self.options.requests // _CHOICE_SHARE, 10), max(self.options.rates)
        for budget in BUDGETS:
            with self.theirs(PeerSettings(python, budget, self.options.kv_gib)) as url:
                _, verdict = self.one(url, rate, salt=1_000 + budget, side="peer", requests=requests)
                self.found.budgets[budget] = verdict
                self.say(f"chunk budget {budget}: {words_of(verdict)}")
        return best_of(self.found.budgets)

    def one(self, url: str, rate: float, *, salt: int, side: str, requests: int = 0) -> tuple[list[RequestRecord], Verdict]:
        plan = plan_at(self.trace, rate, requests or self.options.requests)
        targets = Targets(self.options.slo.ttft_s * 1e3, self.options.slo.tpot_s * 1e3)
        sent = self.options.send_targets and side == "ours"

        async def run() -> list[RequestRecord]:
            async with open_session(url, timeout_s=_TIMEOUT_S) as session:
                shape = RequestShape(await served_model(session, url), f"bench-{salt}", targets, send_targets=sent)
                clock = MonotonicClock()
                replayed = Replay(plan, PromptMaker(token_alphabet(), salt=salt), HttpSender(session, clock), shape, clock)
                shown = asyncio.create_task(_show(replayed, self.say))
                try:
                    await replayed.run()
                finally:
                    shown.cancel()
                return replayed.records

        records = asyncio.run(run())
        return records, judge(records, self.options.slo, plan.span_s)


def best_of(budgets: dict[int, Verdict]) -> int:
    return min(budgets, key=lambda budget: (-budgets[budget].met, budgets[budget].ttft_ms.get("p90", float("inf")), budget))


def words_of(verdict: Verdict) -> str:
    quantiles = ", ".join(
        f"{name} p50/p90/p99 " + "/".join(f"{value:.0f}" for value in found.values()) + " ms"
        for name, found in (("TTFT", verdict.ttft_ms), ("TPOT", verdict.tpot_ms))
    )
    return (
        f"  {verdict.met} of {verdict.requests} in their targets ({verdict.slo_share:.0%}),"
        f" goodput {verdict.goodput_per_s:.3f}/s, {verdict.refused} refused, {verdict.failed} failed,"
        f" {verdict.cached_share:.0%} cached, {quantiles}"
    )


async def _warm(url: str) -> None:
    """A long prompt, and some that decode together: first steps of each kind are slower."""
    async with open_session(url, timeout_s=300) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, url))
        await client.ask(0, 1_024, 4)
        await asyncio.gather(*(client.ask(number, 128, 16) for number in range(1, 9)))


async def _show(replayed: Replay, say: Say) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        progress = replayed.progress
        say(f"  {progress.sent} of {progress.planned} sent, {progress.in_flight} in flight")
