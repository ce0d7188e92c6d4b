"""Eviction policies by the names that ``store.eviction`` takes."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.errors import ConfigError
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.eviction.policy import EvictionPolicy

_MAKERS: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy; every tier of every node has its own."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"store.eviction is {name!r}, which is none of {', '.join(sorted(_MAKERS))}")
    return maker()
