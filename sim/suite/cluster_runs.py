"""A cluster run's settings, made into the simulator's cluster and brought back as figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.planner import Planner, Settings
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import Group, SimCluster, SimModel, Ssd, TargetsS, read_cluster
from moonpool.sim.costs import prefill_s
from moonpool.sim.outcome import Load, Outcome, RequestOutcome
from moonpool.sim.run import DECISIONS_KEPT, Simulation
from moonpool.sim.suite.settings import ClusterRun, ForcedRun, SpeedRun
from moonpool.sim.suite.workload import load

FROM_S = 120.0  # after the start: caches are cold and roles as given before
WINDOW_S, OVER_S = 30.0, 1_200.0  # the swing of a load: windows, and the time looked at


def cluster_of(run: ClusterRun) -> SimCluster:
    name = "llama70b_8p8d" if run.decode_slope == "served" else "llama70b_8p8d_single"
    base = read_cluster("llama70b_prefill" if run.workload.one_token else name)
    return base.changed(
        groups=tuple(_group(group, run) for group in base.groups),
        model=base.model.model_copy(update={"kv_bytes_per_token": _kv_bytes(base.model, run.kv_bytes)}),
        prefill=base.prefill.model_copy(
            update={
                **{key: getattr(base.prefill, key) * run.prefill_factor for key in "abcd"},
                "span_factor": run.span_factor,
            }
        ),
        link=base.link.model_copy(update={"bytes_per_s": run.link_bytes_per_s}),
        ssd=Ssd(read_bytes_per_s=run.ssd_read_bytes_per_s, write_bytes_per_s=run.ssd_read_bytes_per_s)
        if run.ssd_tokens
        else None,
        eviction=run.eviction,
        order=run.order,
        age=run.age,
        post_prefill_s=run.after_prefill_s,
        targets=TargetsS(ttft_s=run.ttft_limit_s, tbt_s=run.tbt_limit_s, sent=run.admission != "none"),
    )


def _group(group: Group, run: ClusterRun) -> Group:
    if group.role == "prefill":
        return group.model_copy(update={"count": run.prefill, "pool_tokens": run.pool_tokens, "ssd_tokens": run.ssd_tokens})
    pool = run.pool_tokens if run.planner else group.pool_tokens  # equal machines, where any of them may prefill
    return group.model_copy(update={"count": run.decode, "pool_tokens": pool})


def _kv_bytes(model: SimModel, share: float) -> int:
    least = 4 * model.layers  # two bytes each of key and value in every layer
    return int(model.kv_bytes_per_token * share) // least * least


def replay(run: ClusterRun, traces: Path | None) -> Outcome:
    return simulation(run, traces).run()


def simulation(run: ClusterRun, traces: Path | None) -> Simulation:
    machines = cluster_of(run)
    planner = Planner(Settings(ttft_s=run.ttft_limit_s, tbt_s=run.tbt_limit_s)) if run.planner else None
    conductor = Conductor(
        policy=make_policy(run.policy, run.policy_settings),
        admission=make_admission(run.admission, run.admission_settings),
        planner=planner,
        booking_s=machines.budget_s,
        log_limit=DECISIONS_KEPT,
    )
    return Simulation(load(run.workload, traces), machines, conductor, run.speed, run.bursts)


def forced_figures(run: ForcedRun, traces: Path | None) -> dict[str, float]:
    from moonpool.sim.forced import force_refused

    base = run.base
    forced = force_refused(
        load(base.workload, traces),
        cluster_of(base),
        policy=lambda: make_policy(base.policy, base.policy_settings),
        admission=lambda: make_admission(base.admission, base.admission_settings),
        samples=run.samples,
        speed=base.speed,
        bursts=base.bursts,
    )
    return forced.figures()


def cluster_figures(run: ClusterRun, traces: Path | None) -> dict[str, float]:
    simulated = simulation(run, traces)
    outcome = simulated.run()
    figures = outcome.figures()
    requests = outcome.requests
    late = [r for r in requests if r.arrived >= FROM_S]
    begun = [r for r in requests if r.ttft_s is not None and r.refused is None]
    return {
        "requests": figures["requests"],
        "served": figures["served"],
        "failed": figures["failed"],
        "hit_rate": figures["hit_share"],
        "mean_ttft_s": figures["ttft_mean_s"],
        "mean_joined_s": sum((r.ttft_s or 0.0) + r.handoff_s for r in begun) / max(len(begun), 1),
        "p50_ttft_s": figures["ttft_p50_s"],
        "p90_ttft_s": figures["ttft_p90_s"],
        "p99_ttft_s": figures["ttft_p99_s"],
        "max_ttft_s": figures["ttft_max_s"],
        "share_5s": figures["ttft_5s_share"],
        "mean_wait_s": figures["waited_mean_s"],
        "max_wait_s": max((r.waited_s for r in begun), default=0.0),
        "mean_tbt_s": figures["tbt_mean_s"],
        "p90_tbt_s": figures["tbt_p90_s"],
        "tbt_share": _tbt_share(begun, run.tbt_limit_s),
        "tbt_share_of_all": _tbt_share(requests, run.tbt_limit_s),
        "refused": figures["refused"],
        "refused_late": float(sum(r.refused is not None and r.prefill_s > 0.0 for r in requests)),
        "prefill_s": figures["prefill_s"],
        "wasted_s": figures["wasted_prefill_s"],
        "met_requests": figures["met"],
        "met_tokens": figures["met_tokens"],
        "effective": figures["met_share"],
        "effective_after_120s": _share(late, run),
        "swing": swing(outcome.load, max((r.arrived for r in requests), default=0.0)),
        "switches": figures.get("switches", 0.0),
        **_ssd(simulated, outcome),
        "leaks": float(sum(outcome.leaks.values())),
        "seconds": figures["seconds"],
    }


def _ssd(simulated: Simulation, outcome: Outcome) -> dict[str, float]:
    """Seconds of reading, and the share of them that no prompt stood still for while it was being computed. A wait for
    another node's blocks counts as one for the SSD."""
    cost = simulated.cluster.prefill
    tiers = [store.ssd for store in simulated.site.stores.values() if store.ssd is not None]
    if simulated.cluster.ssd is None or not tiers:
        return {}
    seconds = sum(tier.read_bytes for tier in tiers) / simulated.cluster.ssd.read_bytes_per_s
    waited = sum(
        max(r.prefill_s - prefill_s(cost, r.prompt_tokens, r.cached_tokens), 0.0) for r in outcome.requests if r.attempts == 1
    )
    return {"ssd_read_s": seconds, "ssd_waited_s": waited, "ssd_hidden": 1.0 - min(waited / seconds, 1.0) if seconds else 1.0}


def highest_speed(run: SpeedRun, traces: Path | None) -> dict[str, float]:
    """Halves the range of speeds until one step is left: the share inside falls with speed but for single requests."""
    low, high = 0, round((run.most - run.least) / run.step)
    tried: dict[str, float] = {}
    while low < high:
        middle = (low + high + 1) // 2
        speed = run.least + middle * run.step
        outcome = replay(run.base.model_copy(update={"speed": speed}), traces)
        inside = sum(r.ttft_s is not None and r.ttft_s <= run.within_s for r in outcome.requests) / len(outcome.requests)
        tried[f"share_at_{speed:.2f}"] = inside
        low, high = (middle, high) if inside >= run.share else (low, middle - 1)
    return {"speed": run.least + low * run.step, **tried}


def swing(load: Sequence[Load], until: float) -> float:
    """Standard deviation of a stage's load, windows of 30 s, at most the last 20 minutes of arrivals; mean of both stages."""
    first = max(FROM_S, until - OVER_S)
    windows: dict[int, list[Load]] = {}
    for one in load:
        if first <= one.at <= until:
            windows.setdefault(int((one.at - first) // WINDOW_S), []).append(one)
    if not windows:
        return 0.0
    table = np.array(
        [(np.mean([one.prefill_load for one in each]), np.mean([one.decode_load for one in each])) for each in windows.values()]
    )
    return float(table.std(axis=0).mean())


def _tbt_share(requests: Sequence[RequestOutcome], limit_s: float) -> float:
    """Of those that got, or were refused, more than one token; who was refused or failed has missed."""
    told = [r for r in requests if r.output_tokens > 1]
    return sum(r.tbt_s is not None and r.tbt_s <= limit_s for r in told) / len(told) if told else 0.0


def _share(requests: Sequence[RequestOutcome], run: ClusterRun) -> float:
    return sum(r.met(run.ttft_limit_s, run.tbt_limit_s) for r in requests) / len(requests) if requests else 0.0
