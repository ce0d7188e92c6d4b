"""``moonpool bench serve --peer-python PATH``: our cluster and vLLM's CPU server on the same cores, in turns, over HTTP.

Both servers stay up; a sample of one is taken while the other is idle, and whoever is first changes from turn to turn. While
ours is measured the peer is stopped (SIGSTOP): its threads spin on after an answer. Ours sleep, and what they burn while idle
is measured. Prompts are token ids, answers stream, sampling is greedy, end-of-text is ignored, every sample has prompts of its
own. The peer computes as many tokens per step as suits it best of 512, 1,024 and 2,048: it is started with each, all
figures are sampled, and the budget with the lowest geometric mean of times stays. Both sides have the same memory for KV.

Keys, ours over theirs, medians over the turns (``spread``: least and most over the turns; ``samples``: every value):

    ttft_512_vs_peer, ttft_2048_vs_peer, ttft_4096_vs_peer     first text of a prompt never seen
    warm_ttft_2048_vs_peer, warm_ttft_4096_vs_peer              the same prompt again
    tpot_1_vs_peer, tpot_4_vs_peer, tpot_16_vs_peer             time per token, so many requests decoding together
    out_tok_s_32_vs_peer       output tokens per second, 32 in flight, 128 in and 128 out: above 1 is faster
    startup_vs_peer            process start to first answer, ours with compiled kernels cached, theirs in its last start
    rss_vs_peer                resident memory of all processes of a side, shared pages once, after everything
    ttft_512_ms, peer_ttft_512_ms, ...                          the medians themselves
    pool_warm_ttft_2048_ms, pool_warm_ttft_4096_ms              ours, from the pool: device pages dropped before
    startup_first_s            ours with an empty kernel cache
    engines                    the backend that each of our workers really computes with
    idle_cores, peer_idle_cores                                 CPU seconds per second while nobody asks
    ceilings                    what the machine reads and multiplies at best: bench.ceilings
    peer, peer_python, peer_facts, peer_budgets, peer_starts_s  version, settings, CPUs its threads may run on, the choice
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.bench import beside
from moonpool.bench.asking import AskingClient, ttft_ms
from moonpool.bench.beside import Side, best_budget, score_of, take_turns
from moonpool.bench.ceilings import ceilings
from moonpool.bench.local_cluster import LocalCluster, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.our_side import engines_of, forget_pages, nodes_of, our_settings
from moonpool.bench.process_trees import cluster_processes, idle_share, resident_bytes, stopped
from moonpool.bench.random_model import FAMILIES, make_random_model
from moonpool.bench.sides import Samples, compared
from moonpool.bench.vllm_side import BUDGETS, Peer, PeerSettings, peer_version, vllm_server
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock

_STARTS = 3  # of ours, with a warm kernel cache
_IDLE_S = 3.0
_SETTLE_S = 0.5
_PEER_START_S, _CHOICE_S, _TURN_S, _OUR_START_S = 70, 55, 60, 15  # for the estimate alone
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BesideOptions:
    """``turns``: samples per figure and side. ``chunk_budget`` 0: the best is looked for. ``kv_gib``: of either side.
    ``family``: empty, or a family whose random weights stand in for those of ``model``.
    """

    peer_python: str
    roles: str = "both"
    model: str = "smollm2"
    family: str = ""
    turns: int = 3
    chunk_budget: int = 0
    kv_gib: int = 1
    engine: str = "auto"
    settings: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        for name, value, least in (("repeats", self.turns, 1), ("chunk_budget", self.chunk_budget, 0), ("kv", self.kv_gib, 1)):
            if value < least:
                raise ConfigError(f"{name}: {value} is too small; use {least} or more", param=name)
        if self.family and self.family not in FAMILIES:
            raise ConfigError(f"family: {self.family!r} is unknown; use {' or '.join(FAMILIES)}", param="family")

    @property
    def budgets(self) -> tuple[int, ...]:
        return (self.chunk_budget,) if self.chunk_budget else BUDGETS

    def estimate_s(self) -> int:
        choice = len(BUDGETS) * (_PEER_START_S + _CHOICE_S) if len(self.budgets) > 1 else 0
        return choice + _PEER_START_S + (_STARTS + 2) * _OUR_START_S + (self.turns + 1) * _TURN_S


def serve_beside(options: BesideOptions, say: Say) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a side that does not start or answer."""
    options.check()
    python = Path(options.peer_python).expanduser()
    version = peer_version(python)
    nodes = nodes_of(options.roles)
    settings = our_settings(nodes, options.kv_gib << 30, options.engine, options.settings)
    say(f"this takes about {options.estimate_s() // 60 + 1} minutes")
    machine = machine_facts()
    bounds = ceilings(int(str(machine["cores"])))
    with _model(options, say) as model_dir:
        run = _Run(options, nodes, settings, model_dir, say)
        with tempfile.TemporaryDirectory(prefix="moonpool-kernels-") as empty:
            first = run.startup({"XDG_CACHE_HOME": empty})
        starts = [run.startup({}) for _ in range(_STARTS - 1)]
        budgets = run.budgets(python)
        chosen = best_budget({budget: float(found["score"]) for budget, found in budgets.items()}) if budgets else 0
        peer_settings = PeerSettings(python, chosen or options.chunk_budget, options.kv_gib)
        found = run.turns(peer_settings, starts)
    return {
        "roles": options.roles, "model": options.model, "family": options.family, "engine": options.engine,
        "dtype": "bfloat16", "kv_bytes": options.kv_gib << 30, "settings": settings, "machine": machine,
        "ceilings": bounds, "peer": version, "peer_python": str(python),
        "peer_budgets": {str(budget): each for budget, each in budgets.items()}, "startup_first_s": first, **found,
    }  # fmt: skip


@contextmanager
def _model(options: BesideOptions, say: Say) -> Iterator[Path]:
    model_dir = local_model(options.model, say)
    if not options.family:
        yield model_dir
        return
    with tempfile.TemporaryDirectory(prefix="moonpool-model-") as folder:
        say(f"making a random {options.family} model as large as {options.model}")
        yield make_random_model(Path(folder) / options.family, next(f for f in FAMILIES if f == options.family), model_dir)


@dataclass(slots=True)
class _Run:
    options: BesideOptions
    nodes: str
    settings: dict[str, str]
    model_dir: Path
    say: Say

    def startup(self, environment: dict[str, str]) -> float:
        """Seconds from starting a cluster to its first answer; it is ended again."""
        with self.cluster(environment) as (_, taken):
            return taken

    @contextmanager
    def cluster(self, environment: dict[str, str]) -> Iterator[tuple[LocalCluster, float]]:
        began = time.monotonic()
        with local_cluster(self.nodes, self.model_dir, self.settings, environment=environment) as cluster:
            asyncio.run(_first_answer(cluster.url))
            taken = time.monotonic() - began
            self.say(f"ours: first answer after {taken:.1f} s")
            yield cluster, taken

    def budgets(self, python: Path) -> dict[int, dict[str, Any]]:
        """Every chunk budget with its score, figures and start; nothing where only one is meant."""
        if len(self.options.budgets) < 2:
            return {}
        found: dict[int, dict[str, Any]] = {}
        for budget in self.options.budgets:
            with vllm_server(PeerSettings(python, budget, self.options.kv_gib), self.model_dir, self.say) as peer:
                score, figures = asyncio.run(_scored(peer.url))
                found[budget] = {"score": score, "startup_s": peer.startup_s, "figures": figures}
                self.say(f"peer: chunk budget {budget}: geometric mean {score:.1f} ms")
        return found

    def turns(self, settings: PeerSettings, starts: list[float]) -> dict[str, Any]:
        with vllm_server(settings, self.model_dir, self.say) as peer, self.cluster({}) as (cluster, taken):
            ours, theirs, facts = asyncio.run(_measure(cluster, peer, self.options.turns, self.say))
            ours["startup_s"], theirs["startup_s"] = [*starts, taken], [peer.startup_s]
            ours["rss_bytes"] = [float(resident_bytes(cluster_processes(cluster.state_dir)))]
            theirs["rss_bytes"] = [float(resident_bytes(peer.processes()))]
            found = {**compared(ours, theirs), **facts, "peer_facts": peer.facts()}
        return {**found, "samples": {"ours": ours, "peer": theirs}}


async def _first_answer(url: str) -> None:
    async with open_session(url, timeout_s=300) as session:
        await AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, url)).ask(0, 64, 1)


async def _scored(url: str) -> tuple[float, dict[str, float]]:
    async with open_session(url, timeout_s=600) as session:
        return await score_of(AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, url)))


async def _measure(cluster: LocalCluster, peer: Peer, turns: int, say: Say) -> tuple[Samples, Samples, dict[str, Any]]:
    async with open_session(cluster.url, timeout_s=600) as mine, open_session(peer.url, timeout_s=600) as other:
        clock = MonotonicClock()
        client = AskingClient(HttpSender(mine, clock), await served_model(mine, cluster.url))
        ours = Side(client)
        theirs = Side(AskingClient(HttpSender(other, clock), await served_model(other, peer.url)))
        idle = idle_share(cluster_processes(cluster.state_dir), _IDLE_S)
        peer_idle = idle_share(peer.processes(), _IDLE_S)
        say(f"idle: ours takes {idle:.3f} of a core, the peer {peer_idle:.3f}")
        ours.alone = lambda: stopped(peer.processes())
        await take_turns(ours, theirs, turns, say)
        with ours.alone():
            await _from_the_pool(cluster, ours, turns, say)
        facts = {"idle_cores": idle, "peer_idle_cores": peer_idle}
        return ours.samples, theirs.samples, {**facts, "engines": await engines_of(cluster)}


async def _from_the_pool(cluster: LocalCluster, ours: Side, turns: int, say: Say) -> None:
    """The same prompt again once the device pages are gone."""
    for length in beside.WARM:
        for turn in range(turns + 1):
            prompt = (turn + 1) * 1_000_000 + length
            await ours.client.ask(prompt, length, 4)
            await asyncio.sleep(_SETTLE_S)
            await forget_pages(cluster)
            answer = await ours.client.ask(prompt, length, 4)
            await asyncio.sleep(_SETTLE_S)
            if turn:
                ours.samples.setdefault(f"pool_warm_ttft_{length}_ms", []).append(ttft_ms(answer))
                ours.samples.setdefault(f"pool_warm_cached_{length}", []).append(float(answer.reading.cached_tokens or 0))
        say(f"from the pool, {length} tokens: {ours.samples[f'pool_warm_ttft_{length}_ms'][-1]:.1f} ms")
