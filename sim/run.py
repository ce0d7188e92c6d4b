"""Replay a trace on a simulated cluster: the production conductor, queues, batchers, pools and hand-offs on a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.use import Use
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
from moonpool.sim.cluster import Group, SimCluster
from moonpool.sim.costs import Noise
from moonpool.sim.decode_node import DecodeNode
from moonpool.sim.gateway import Gateway
from moonpool.sim.links import Links
from moonpool.sim.one_cache import turns
from moonpool.sim.outcome import Load, Outcome, RequestOutcome
from moonpool.sim.prefill_node import PrefillNode
from moonpool.sim.site import Site
from moonpool.sim.store_node import StoreNode

Bursts = Literal["released", "spread"]
Progress = Callable[[int, int], None]
DECISIONS_KEPT = 2_000
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.BOTH}


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
) -> Outcome:
    """What becomes of ``rows``. Equal arguments, equal outcome; policies and admissions keep state, so give fresh ones.

    ``speed`` 2 lets requests come twice as fast; ``bursts`` spread: requests of one timestamp come evenly until the next one.
    ``seed`` is that of ``SimCluster.noise``. ``on_progress`` hears (requests ended, of how many). ConfigError for values that
    cannot be meant.
    """
    conductor = Conductor(
        policy=policy, admission=admission, planner=planner, booking_s=cluster.budget_s, log_limit=DECISIONS_KEPT
    )
    return Simulation(rows, cluster, conductor, speed, bursts, seed, on_progress).run()


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
        self.prefills: dict[MemberId, PrefillNode] = {}
        self.decodes: dict[MemberId, DecodeNode] = {}
        self.outcome = Outcome([], cluster.targets.ttft_s, cluster.targets.tbt_s, counters)
        self._on_progress = on_progress
        self._requests = self._read(rows, speed, bursts)
        self._left = len(self._requests)

    def run(self) -> Outcome:
        for name, group in self.cluster.nodes.items():
            self._start(name, group)
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

    def _read(self, rows: Sequence[TraceRow], speed: float, bursts: Bursts) -> list[SimRequest]:
        block = self.cluster.model.block_tokens
        plan = plan_sends(Trace(tuple(rows), block), Scaling(speed=speed, spread=bursts == "spread"))
        out = []
        for at, (row, send, turn) in enumerate(zip(rows, plan.sends, turns(rows, block), strict=True)):
            wanted = max(row.output_length, 1)
            if self.cluster.max_output:
                wanted = min(wanted, self.cluster.max_output)
            keys = tuple(one.to_bytes(16, "little") for one in row.hash_ids[: row.input_length // block])
            result = RequestOutcome(at, send.at_s, row.input_length, wanted, turn=turn)
            self.outcome.requests.append(result)
            use = Use(turn=turn, prompt_tokens=row.input_length)
            out.append(SimRequest(f"r{at}", keys, row.input_length, wanted, use, result))
        return out

    # -- machines ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, group: Group) -> None:
        life = Incarnation(1)
        store = StoreNode(name, life, group, self.cluster, self.clock, self.brain.tell)
        self.site.stores[NodeId(name)] = store
        self.brain.tell(MemberChange(store.member, Liveness.LIVE))
        member = Member(
            MemberId(f"{group.role}-{name}"),
            ROLES[group.role],
            NodeId(name),
            life,
            f"{name}:2",
            0,
            layout=self.cluster.model.layout(self.cluster.model.layers),
            max_context=self.cluster.model.max_context,
            max_prompt=group.device_tokens,
        )
        if group.role == "prefill":
            prefiller = self.prefills[member.id] = PrefillNode(self.site, member, group)
            self.site.prefillers[member.id] = prefiller
        else:
            decoder = self.decodes[member.id] = DecodeNode(self.site, member, group)
            self.site.decoders[member.id] = decoder
            self.gateway.decoders[member.id] = decoder
        self.brain.tell(MemberChange(member, Liveness.LIVE))

    def _perform(self, action: Action) -> None:
        match action:
            case Bound():
                self.gateway.bound(action)
            case Resync(holder):
                self.brain.tell(self.site.stores[holder].pool.snapshot())
            case Cool(node, keys):
                self.site.stores[node].cool(keys)
            case Replicate() | Prefetch() | SwitchRole():
                self.outcome.counters["actions_ignored"] += 1

    # -- what is told --------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        self._left -= 1
        if not self._left:
            self.brain.stop()
        if self._on_progress is not None:
            self._on_progress(self.gateway.ended, len(self._requests))

    def _sample(self) -> None:
        targets = self.cluster.targets
        prefills = [node for node in self.prefills.values() if node.alive]
        decodes = [node for node in self.decodes.values() if node.alive]
        self.outcome.load.append(
            Load(
                self.clock.now,
                self.gateway.unbegun,
                self.gateway.open - self.gateway.unbegun,
                sum(len(node.jobs) for node in decodes),
                sum(node.backlog() for node in prefills) / max(len(prefills), 1) / targets.ttft_s,
                sum(node.step_now() for node in decodes) / max(len(decodes), 1) / targets.tbt_s,
                len(prefills),
                len(decodes),
            )
        )
        if self._left:
            self.clock.after(self.cluster.sample_s, self._sample)

    def _leaks(self) -> dict[str, float]:
        """What the production objects still hold: nothing, in a sound run."""
        stores = [store.pool.numbers() for store in self.site.stores.values()]
        told = self.conductor.numbers(self.clock.now)
        workers: list[PrefillNode | DecodeNode] = [*self.prefills.values(), *self.decodes.values()]
        return {
            **{name: sum(numbers[name] for numbers in stores) for name in ("pins", "landings_open", "tickets", "reservations")},
            "pages": float(sum(node.pages.used for node in workers)),
            "jobs": float(sum(len(node.jobs) for node in workers)),
            "flows": float(len(self.links)),
            "bookings": told["bookings"],
            "waiting": told["waiting"] + len(self.gateway.waiting),
        }
