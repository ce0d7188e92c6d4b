"""Who is compared, with constants that were frozen before the reported runs.

Every contender got the same grid on traces that are not reported (sessions shuffled by ``TUNING_SEED``): see docs/suite.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moonpool.sim.suite.settings import ClusterRun, Settings
from moonpool.sim.suite.workload import Workload

TUNING_SEED = 101


@dataclass(frozen=True, slots=True)
class Contender:
    """A placement policy with the queue order and eviction it is compared with."""

    policy: str
    settings: Settings = field(default_factory=dict)
    order: Literal["fifo", "shortest"] = "fifo"  # of a prefill worker's own queue
    age: float = 0.1
    eviction: str = "lru"

    def run(self, workload: Workload, *, prefill: int, decode: int) -> ClusterRun:
        return ClusterRun(
            workload=workload,
            prefill=prefill,
            decode=decode,
            policy=self.policy,
            policy_settings=self.settings,
            order=self.order,
            age=self.age,
            eviction=self.eviction,
        )


RANDOM = Contender("random")
LOAD = Contender("least_loaded")
LOCAL = Contender("local_min_ttft")
LOCAL_SHORTEST = Contender("local_min_ttft", order="shortest")
PAPER = Contender("algorithm1")
OURS_FIFO = Contender("moonpool", {"size_weight": 0.0}, eviction="hazard")  # in the order of arrival, as the others
OURS = Contender("moonpool", eviction="hazard")
OURS_GROUPS = Contender("moonpool", {"group": 8.0}, eviction="hazard")  # idle workers share long prompts


@dataclass(frozen=True, slots=True)
class Admission:
    """What is refused, with the placement it is compared over: the same for all, so that only refusing differs."""

    name: str
    contender: Contender = OURS
    settings: Settings = field(default_factory=dict)


BASELINE = Admission("baseline")
EARLY = Admission("early")
EARLY_PREDICTED = Admission("early_predicted")
OURS_ADMISSION = Admission("moonpool")
