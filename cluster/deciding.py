"""The conductor's deciding part as configured: policy and admission by name, with their own numbers."""

from __future__ import annotations

from moonpool.cluster.role_moves import make_planner
from moonpool.core.config import Config, SchedulerConfig
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policy import Policy


def policy_of(scheduler: SchedulerConfig) -> Policy:
    """InvalidRequest names an unknown policy or setting."""
    return make_policy(scheduler.policy, scheduler.policy_settings)


def admission_of(scheduler: SchedulerConfig) -> Admission:
    """InvalidRequest names an unknown admission or setting."""
    return make_admission(scheduler.admission, scheduler.admission_settings)


def conductor_of(config: Config) -> Conductor:
    scheduler = config.scheduler
    return Conductor(
        policy=policy_of(scheduler),
        admission=admission_of(scheduler),
        booking_s=config.timing.request_budget_ms / 1e3,
        log_limit=scheduler.log_limit,
        max_waiting=scheduler.max_waiting,
        planner=make_planner(scheduler),
    )
