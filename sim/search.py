"""The cheapest cluster that serves a trace inside its targets: how many prefill and how many decode nodes.

More nodes of either kind never hurt (but for single requests), so what suffices has a border that is walked: the fewest
prefill nodes with decode nodes in plenty, then step by step fewer decode nodes, one more prefill node where that fails.
Node counts that the work alone rules out are not tried, and a run ends as soon as too many requests have missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.core.errors import ConfigError
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.planner import Planner, Settings
from moonpool.scheduler.policy import Policy
from moonpool.sim.cluster import SimCluster, TargetsS
from moonpool.sim.costs import prefill_s
from moonpool.sim.run import Bursts, Simulation

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Goal:
    """``share`` of all requests inside the cluster's targets, at ``speed`` times the trace's own."""

    share: float = 0.98
    speed: float = 1.0
    bursts: Bursts = "released"
    most: int = 64  # nodes of one kind that are tried
    prefill_price: float = 1.0  # of one node, in any unit
    decode_price: float = 1.0

    def cost(self, prefill: int, decode: int) -> float:
        return prefill * self.prefill_price + decode * self.decode_price


@dataclass(frozen=True, slots=True)
class Tried:
    """``share``: of all requests; where the run was ended early, the most that it could still have come to."""

    prefill: int
    decode: int
    share: float
    suffices: bool
    pruned: bool


@dataclass(slots=True)
class Found:
    prefill: int
    decode: int
    cost: float
    share: float
    tried: list[Tried] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Makers:
    """Policies, admissions and planners keep state: every run gets fresh ones."""

    policy: Callable[[], Policy]
    admission: Callable[[], Admission]
    planner: Callable[[], Planner | None] = lambda: None


def planner_of(name: str, settings: Mapping[str, float], targets: TargetsS) -> Planner | None:
    """``fixed``: none; ``auto``: one with ``settings``, for the cluster's targets."""
    if name not in ("fixed", "auto"):
        raise ConfigError(f"roles: {name!r} is neither fixed nor auto", param="roles")
    return None if name == "fixed" else Planner(Settings.of({"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s, **settings}))


class _Enough(Exception):
    """The run cannot come to the share that is wanted any more."""


class Search:
    def __init__(
        self,
        rows: Sequence[TraceRow],
        cluster: SimCluster,
        makers: Makers,
        goal: Goal,
        on_try: Callable[[Tried], None] = lambda tried: None,
    ) -> None:
        """``cluster`` has one group of prefill and one of decode nodes, whose counts do not matter."""
        if sorted(group.role for group in cluster.groups) != sorted(ROLES):
            raise ConfigError("groups: a search needs one group of prefill and one of decode nodes", param="groups")
        if not rows:
            raise ConfigError("trace: it has no requests; nothing to search a cluster for", param="trace")
        if not 0.0 < goal.share <= 1.0:
            raise ConfigError(f"share: {goal.share} is no share of requests; give one above 0 and up to 1", param="share")
        self._rows, self._cluster, self._makers, self._goal, self._on_try = rows, cluster, makers, goal, on_try
        self._known: dict[tuple[int, int], Tried] = {}

    def cheapest(self) -> Found:
        """ConfigError where not even ``goal.most`` nodes of either kind suffice."""
        goal = self._goal
        least_p, least_d = self.least
        most_d = self._growing(lambda decode: self._try(goal.most, decode).suffices, least_d)
        if most_d is None:
            raise ConfigError(
                f"search: {goal.most} prefill and {goal.most} decode nodes do not keep {goal.share:.0%} inside the targets; "
                "relax targets or share, or allow more nodes",
                param="most",
            )
        first = self._growing(lambda prefill: self._try(prefill, goal.most).suffices, least_p) or goal.most
        return self._walk(first, goal.most, most_d)

    def best_split(self, nodes: int) -> Found:
        """Of ``nodes`` in all, the split with the largest share inside the targets, whether or not it reaches the goal."""
        if nodes < 2:
            raise ConfigError(f"nodes: {nodes}; at least one of either kind is needed", param="nodes")
        work_p, work_d = self._work()
        at = min(max(round(nodes * work_p / (work_p + work_d)), 1), nodes - 1)
        best = self._try(at, nodes - at, prune=False)
        for step in (1, -1):
            while 1 <= best.prefill + step < nodes:
                other = self._try(best.prefill + step, best.decode - step, prune=False)
                if other.share <= best.share:
                    break
                best = other
        return self._found(best)

    @property
    def least(self) -> tuple[int, int]:
        """Node counts below which the work alone does not fit: every block that ever was seen taken as cached, and the
        requests outside the share taken as the heaviest ones."""
        work_p, work_d = self._work()
        return max(1, math.ceil(work_p)), max(1, math.ceil(work_d))

    # -- the border ----------------------------------------------------------------------------------------------------

    def _growing(self, suffices: Callable[[int], bool], least: int) -> int | None:
        """The smallest count from ``least`` up that suffices: doubled until one does, then halved."""
        low, high = least - 1, least
        while not suffices(high):
            if high >= self._goal.most:
                return None
            low, high = high, min(2 * high, self._goal.most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        return high

    def _walk(self, prefill: int, decode: int, least_d: int) -> Found:
        """Down the border from many decode nodes; ``least_d`` suffice with prefill nodes in plenty, fewer never do."""
        goal, best = self._goal, self._try(prefill, decode)
        while prefill <= goal.most and goal.cost(prefill, least_d) < goal.cost(best.prefill, best.decode):
            fewest = self._fewest(prefill, best, least_d, decode)
            if fewest is not None:
                decode = fewest
                if goal.cost(prefill, fewest) < goal.cost(best.prefill, best.decode):
                    best = self._try(prefill, fewest)
            prefill += 1
        return self._found(best)

    def _fewest(self, prefill: int, best: Tried, least_d: int, decode: int) -> int | None:
        """The fewest decode nodes beside ``prefill``: None where not even those that would be cheaper than ``best`` do."""
        goal = self._goal
        if self._try(prefill, least_d).suffices:
            return least_d
        if prefill == best.prefill:
            high = decode
        else:
            affordable = (goal.cost(best.prefill, best.decode) - goal.cost(prefill, 0)) / goal.decode_price
            high = min(decode, math.ceil(affordable) - 1)
            if high <= least_d or not self._try(prefill, high).suffices:
                return None
        low = least_d
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(prefill, middle).suffices else (middle, high)
        return high

    def _found(self, best: Tried) -> Found:
        cost = self._goal.cost(best.prefill, best.decode)
        return Found(best.prefill, best.decode, cost, best.share, list(self._known.values()))

    # -- one run -------------------------------------------------------------------------------------------------------

    def _try(self, prefill: int, decode: int, *, prune: bool = True) -> Tried:
        known = self._known.get((prefill, decode))
        if known is None or (known.pruned and not prune):
            known = self._known[prefill, decode] = self._run(prefill, decode, prune)
            self._on_try(known)
        return known

    def _run(self, prefill: int, decode: int, prune: bool) -> Tried:
        cluster, total = self._cluster.resized(prefill=prefill, decode=decode), len(self._rows)
        allowed = total - math.ceil(self._goal.share * total - 1e-9)
        misses = _Misses(cluster, allowed if prune else total)
        makers = self._makers
        conductor = Conductor(
            policy=makers.policy(),
            admission=makers.admission(),
            planner=makers.planner(),
            booking_s=cluster.budget_s,
            rule=cluster.rule,
        )
        simulation = Simulation(
            self._rows, cluster, conductor, self._goal.speed, self._goal.bursts, on_progress=lambda ended, of: misses.look()
        )
        misses.simulation = simulation
        try:
            simulation.run()
        except _Enough:
            return Tried(prefill, decode, 1.0 - misses.seen / total, suffices=False, pruned=True)
        met = sum(r.met(cluster.targets.ttft_s, cluster.targets.tbt_s) for r in simulation.outcome.requests)
        return Tried(prefill, decode, met / total, suffices=total - met <= allowed, pruned=False)

    def _work(self) -> tuple[float, float]:
        """Mean workers kept busy by prefills with an ideal cache, and by decode steps that just meet the target."""
        cost, decode, seen, block = self._cluster.prefill, self._cluster.decode, set[int](), self._cluster.model.block_tokens
        compute, steps = [], []
        for row in self._rows:
            match = 0
            while match < len(row.hash_ids) and row.hash_ids[match] in seen:
                match += 1
            seen.update(row.hash_ids)
            compute.append(prefill_s(cost, row.input_length, min(match * block, row.input_length - 1)))
            mean_context = row.input_length + row.output_length / 2
            steps.append(row.output_length * (decode.per_sequence_s + decode.per_token_s * mean_context))
        counted = math.ceil(self._goal.share * len(self._rows))
        targets, longest = self._cluster.targets, max(row.output_length for row in self._rows)
        span = (self._rows[-1].timestamp_ms - self._rows[0].timestamp_ms) / 1e3 / self._goal.speed + targets.ttft_s
        room = max(1.0 - decode.base_s / targets.tbt_s, 0.05)
        prefill_work, decode_work = (sum(sorted(seconds)[:counted]) for seconds in (compute, steps))
        return prefill_work / span, decode_work / (span + longest * targets.tbt_s) / room


class _Misses:
    """Counts requests that missed as they end; raises once more than ``allowed`` did."""

    def __init__(self, cluster: SimCluster, allowed: int) -> None:
        self._targets, self._allowed = cluster.targets, allowed
        self.simulation: Simulation | None = None
        self.seen = 0
        self._open: list[int] = []
        self._next = 0

    def look(self) -> None:
        """Looks at all requests once in a while: how many have ended outside the targets, or wait for too long already."""
        self._next -= 1
        if self._next > 0 or self.simulation is None:
            return
        self._next = LOOK_EVERY
        now, wanted = self.simulation.clock.now, self._targets
        missed = 0
        for request in self.simulation.outcome.requests:
            ended = request.ended is not None or request.refused is not None or request.failed is not None
            late = request.ttft_s is None and now - request.arrived > wanted.ttft_s
            missed += late or (ended and not request.met(wanted.ttft_s, wanted.tbt_s))
        self.seen = missed
        if missed > self._allowed:
            raise _Enough


LOOK_EVERY = 50  # requests that end between two looks
