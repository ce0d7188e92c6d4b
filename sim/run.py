"""Replay a trace on a simulated cluster: the production conductor, queues, batchers, pools and hand-offs on a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from moonpool.core.ids import NodeId
from moonpool.core.placement import Segment
from moonpool.core.placement import Source as SegmentSource
from moonpool.core.use import DEFAULT_TENANT, Use
from moonpool.loadgen.plan import Scaling, plan_sends
from moonpool.loadgen.trace import Trace, TraceRow
from moonpool.scheduler.actions import Action, Bound, Cool, Prefetch, Replicate, Resync, SwitchRole
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.planner import Planner
from moonpool.scheduler.policy import Policy
from moonpool.sim.attempt import SimRequest
from moonpool.sim.brain import Brain
from moonpool.sim.clock import Clock
from moonpool.sim.cluster import SimCluster
from moonpool.sim.costs import Noise
from moonpool.sim.gateway import Gateway
from moonpool.sim.links import Links
from moonpool.sim.machines import Machines
from moonpool.sim.one_cache import turns
from moonpool.sim.outcome import Load, Outcome, RequestOutcome
from moonpool.sim.prefix import Prefix
from moonpool.sim.site import Site

Bursts = Literal["released", "spread"]
Progress = Callable[[int, int], None]
DECISIONS_KEPT = 2_000


def simulate(
    rows: Sequence[TraceRow],
    cluster: SimCluster,
    *,
    policy: Policy | None = None,
    admission: Admission | None = None,
    planner: Planner | None = None,
    speed: float = 1.0,
    bursts: Bursts = "released",
    seed: int = 0,
    on_progress: Progress | None = None,
    tenants: Sequence[str] = (),
) -> Outcome:
    """What becomes of ``rows``. Equal arguments, equal outcome; policies and admissions keep state, so give fresh ones.

    ``speed`` 2 lets requests come twice as fast; ``bursts`` spread: requests of one timestamp come evenly until the next one.
    ``tenants`` says whose each row is; without it all are one tenant's.
    ``seed`` is that of ``SimCluster.noise``. ``on_progress`` hears (requests ended, of how many). ConfigError for values that
    cannot be meant.
    """
    conductor = Conductor(
        policy=policy,
        admission=admission,
        planner=planner,
        booking_s=cluster.budget_s,
        log_limit=DECISIONS_KEPT,
        rule=cluster.rule,
    )
    return Simulation(rows, cluster, conductor, speed, bursts, seed, on_progress, tenants).run()


class Simulation:
    """One replay. ``conductor`` may be looked at meanwhile and afterwards."""

    def __init__(
        self,
        rows: Sequence[TraceRow],
        cluster: SimCluster,
        conductor: Conductor,
        speed: float = 1.0,
        bursts: Bursts = "released",
        seed: int = 0,
        on_progress: Progress | None = None,
        tenants: Sequence[str] = (),
    ) -> None:
        self.cluster = cluster
        self.clock = Clock()
        counters: Counter[str] = Counter()
        self.conductor = conductor
        self.brain = Brain(self.conductor, self.clock, self._perform)
        self.gateway = Gateway(cluster, self.clock, counters)
        self.gateway.brain = self.brain
        self.gateway.on_end = self._ended
        self.links = Links(self.clock, cluster.link)
        noise = Noise(cluster.noise, seed)
        self.site = Site(cluster, self.clock, self.links, self.brain, self.gateway, noise, counters=counters)
        self.site.token_bytes = cluster.model.kv_bytes_per_token
        self.machines = Machines(self.site, self.gateway)
        self.outcome = Outcome([], cluster.targets.ttft_s, cluster.targets.tbt_s, counters)
        self._on_progress = on_progress
        self._requests = self._read(rows, speed, bursts, tenants or [DEFAULT_TENANT] * len(rows))
        self._left = len(self._requests)

    def run(self) -> Outcome:
        self.machines.start()
        for request in self._requests:
            self.clock.at(request.outcome.arrived, self._arrival(request))
        if self._requests:
            self.clock.at(0.0, self._sample)
        self.clock.run()
        self.outcome.ended = max((r.ended or r.arrived for r in self.outcome.requests), default=0.0)
        self.outcome.leaks = self._leaks()
        return self.outcome

    def _arrival(self, request: SimRequest) -> Callable[[], None]:
        return lambda: self.gateway.arrive(request)

    def _read(self, rows: Sequence[TraceRow], speed: float, bursts: Bursts, tenants: Sequence[str]) -> list[SimRequest]:
        block = self.cluster.model.block_tokens
        plan = plan_sends(Trace(tuple(rows), block), Scaling(speed=speed, spread=bursts == "spread"))
        out = []
        each = zip(rows, plan.sends, turns(rows, block), tenants, strict=True)
        for at, (row, send, turn, tenant) in enumerate(each):
            wanted = max(row.output_length, 1)
            if self.cluster.max_output:
                wanted = min(wanted, self.cluster.max_output)
            keys = tuple(one.to_bytes(16, "little") for one in row.hash_ids[: row.input_length // block])
            result = RequestOutcome(at, send.at_s, row.input_length, wanted, turn=turn)
            self.outcome.requests.append(result)
            use = Use(tenant, turn=turn, prompt_tokens=row.input_length)
            out.append(SimRequest(f"r{at}", keys, row.input_length, wanted, use, result))
        return out

    # -- what the conductor wants done ----------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case Bound():
                self.gateway.bound(action)
            case Resync(holder):
                self.brain.tell(self.site.stores[holder].pool.snapshot())
            case Cool(node, keys):
                self.site.stores[node].cool(keys)
            case SwitchRole(worker, role):
                self.machines.switch(worker, role)
            case Replicate(source, target, keys):
                self._copy(source, target, keys)
            case Prefetch(node, keys):
                self._prefetch(node, keys)

    def _copy(self, source: NodeId, target: NodeId, keys: Sequence[bytes]) -> None:
        """A hot prefix to another node, beside everything else."""
        stores = self.site.stores
        prefix = Prefix(stores[target], self.links, tuple(keys), Use(), lambda: prefix.close() if not prefix.pending else None)
        prefix.pin()
        prefix.bring([Segment(0, len(keys), SegmentSource.FETCH, source)], stores)
        self.outcome.counters["replications"] += 1
        if not prefix.pending:
            prefix.close()

    def _prefetch(self, node: NodeId, keys: Sequence[bytes]) -> None:
        store = self.site.stores[node]
        if store.ssd is not None and store.alive:
            self.outcome.counters["prefetched_blocks"] += store.ssd.read(keys, Use(), lambda _: None)

    # -- what is told --------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        self._left -= 1
        if not self._left:
            self.brain.stop()
        if self._on_progress is not None:
            self._on_progress(self.gateway.ended, len(self._requests))

    def _sample(self) -> None:
        targets = self.cluster.targets
        prefills, decodes = self.machines.prefills.values(), self.machines.decodes.values()
        self.outcome.load.append(
            Load(
                self.clock.now,
                self.gateway.unbegun,
                self.gateway.open - self.gateway.unbegun,
                sum(len(node.jobs) for node in decodes),
                sum(node.backlog() for node in prefills) / max(len(prefills), 1) / targets.ttft_s,
                sum(node.steps.seconds_now() for node in decodes) / max(len(decodes), 1) / targets.tbt_s,
                len(prefills),
                len(decodes),
            )
        )
        if self._left:
            self.clock.after(self.cluster.sample_s, self._sample)

    def _leaks(self) -> dict[str, float]:
        """What the production objects still hold: nothing, in a sound run."""
        stores = [store.pool.numbers() for store in self.site.stores.values() if store.alive]
        told = self.conductor.numbers(self.clock.now)
        workers = self.machines.workers
        return {
            **{name: sum(numbers[name] for numbers in stores) for name in ("pins", "landings_open", "tickets", "reservations")},
            "pages": float(sum(node.pages.used for node in workers)),
            "jobs": float(sum(len(node.jobs) for node in workers)),
            "flows": float(len(self.links)),
            "bookings": told["bookings"],
            "waiting": told["waiting"] + len(self.gateway.waiting),
        }
