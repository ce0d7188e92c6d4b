"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType

from moonpool.core.errors import InvalidRequest
from moonpool.scheduler.policies.algorithm1 import Algorithm1
from moonpool.scheduler.policies.cache_aware_threshold import CacheAwareThreshold
from moonpool.scheduler.policies.dynamo_cost import DynamoCost
from moonpool.scheduler.policies.least_loaded import LeastLoaded
from moonpool.scheduler.policies.local_min_ttft import LocalMinTtft
from moonpool.scheduler.policies.moonpool import Moonpool
from moonpool.scheduler.policies.pooled_min_ttft import PooledMinTtft
from moonpool.scheduler.policies.random_choice import RandomChoice
from moonpool.scheduler.policies.round_robin import RoundRobin
from moonpool.scheduler.policy import Policy

POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            RandomChoice,
            RoundRobin,
            LeastLoaded,
            CacheAwareThreshold,
            DynamoCost,
            LocalMinTtft,
            PooledMinTtft,
            Algorithm1,
            Moonpool,
        )
    }
)


def make_policy(name: str, settings: Mapping[str, float] = MappingProxyType({})) -> Policy:
    """Raises InvalidRequest for an unknown name or setting."""
    kind = POLICIES.get(name)
    if kind is None:
        raise InvalidRequest(f"scheduler.policy: {name!r} is none of {', '.join(sorted(POLICIES))}", param="policy")
    known = list(signature(kind).parameters)
    for setting, value in settings.items():
        if setting not in known:
            has = ", ".join(known) or "none"
            raise InvalidRequest(f"scheduler.policy_settings: {name} has no {setting!r}; it has {has}", param=setting)
        if not value >= 0.0:
            raise InvalidRequest(f"scheduler.policy_settings: {setting} is {value}; give 0 or more", param=setting)
    return kind(**settings)
