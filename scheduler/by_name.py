"""Policies and admissions by the names and numbers that a configuration gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TypeVar

from moonpool.core.errors import InvalidRequest

T = TypeVar("T")


def made(what: str, kinds: Mapping[str, Callable[..., T]], name: str, settings: Mapping[str, float]) -> T:
    """``what``: "policy" or "admission", as the section scheduler of the configuration calls it. Raises InvalidRequest for an
    unknown name or setting, and for a negative one."""
    kind = kinds.get(name)
    if kind is None:
        raise InvalidRequest(f"scheduler.{what}: {name!r} is none of {', '.join(sorted(kinds))}", param=what)
    known = list(signature(kind).parameters)
    for setting, value in settings.items():
        if setting not in known:
            has = ", ".join(known) or "none"
            raise InvalidRequest(f"scheduler.{what}_settings: {name} has no {setting!r}; it has {has}", param=setting)
        if not value >= 0.0:
            raise InvalidRequest(f"scheduler.{what}_settings: {setting} is {value}; give 0 or more", param=setting)
    return kind(**settings)
