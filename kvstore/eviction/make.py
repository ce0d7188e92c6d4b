"""Eviction policies by the names that ``store.eviction`` takes."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.errors import ConfigError
from moonpool.kvstore.eviction.hazard import Hazard
from moonpool.kvstore.eviction.length_aware import LengthAware
from moonpool.kvstore.eviction.lfu import Lfu
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.eviction.s3fifo import S3Fifo

_MAKERS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "length_aware": LengthAware,
    "s3fifo": S3Fifo,
    "hazard": Hazard,
}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy; every tier of every node has its own."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"store.eviction is {name!r}, which is none of {', '.join(sorted(_MAKERS))}")
    return maker()
