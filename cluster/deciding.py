"""The conductor's deciding part as configured: policy and admission by name, with their own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from moonpool.cluster.role_moves import make_planner
from moonpool.core.config import Config, EngineConfig, SchedulerConfig
from moonpool.core.errors import InvalidRequest
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.chunk_size import USUAL
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policies.moonpool import Moonpool
from moonpool.scheduler.policy import Policy
from moonpool.scheduler.prefill_queue import Rule

SHARES = ("chance", "reserve", "fair")  # admission settings that are parts of one
COLOCATED_CHUNKS = 4  # steps that running sequences wait longer in, at most, for one prompt

# What a real cluster needs beside the policy's own defaults: a placement takes this long to reach its prefill worker, by way
# of gateway and decode worker, and until then a worker bound when it is free stands idle. A worker of role both computes
# prompts that are there together in one step, which takes less time than one after another.
LIVE: Mapping[str, Mapping[str, float]] = MappingProxyType({"moonpool": {"lookahead_s": 0.03, "lookahead_both_s": 0.2}})


def policy_of(scheduler: SchedulerConfig, engine: EngineConfig = EngineConfig()) -> Policy:
    """InvalidRequest names an unknown policy or setting."""
    settings = {**LIVE.get(scheduler.policy, {}), **scheduler.policy_settings}
    if scheduler.colocate and scheduler.policy == Moonpool.name:
        chunk = min(engine.prefill_chunk, USUAL)  # it computes beside answers
        paced = {"paced": 1.0, "gap_s": engine.gap_ms / 1e3} if engine.gap_ms else {}
        settings = {"colocate": COLOCATED_CHUNKS * chunk, "chunk": chunk, **paced, **settings}
    return make_policy(scheduler.policy, settings)


def admission_of(scheduler: SchedulerConfig) -> Admission:
    """InvalidRequest names an unknown admission or setting, or a share above 1."""
    for name, value in scheduler.admission_settings.items():
        if name in SHARES and value > 1.0:
            raise InvalidRequest(f"scheduler.admission_settings: {name} is {value}; give 0 to 1", param=name)
    return make_admission(scheduler.admission, scheduler.admission_settings)


def conductor_of(config: Config) -> Conductor:
    scheduler = config.scheduler
    return Conductor(
        policy=policy_of(scheduler, config.engine),
        admission=admission_of(scheduler),
        booking_s=config.timing.request_budget_ms / 1e3,
        log_limit=scheduler.log_limit,
        max_waiting=scheduler.max_waiting,
        planner=make_planner(scheduler),
        min_hit_tokens=config.security.min_hit_tokens,
        rule=Rule(scheduler.order == "shortest", scheduler.age_weight, scheduler.wait_cap_ms / 1e3 or inf),
    )
