"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moonpool.scheduler.by_name import made
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
    """See ``by_name.made``."""
    return made("policy", POLICIES, name, settings)
