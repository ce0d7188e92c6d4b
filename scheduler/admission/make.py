"""Admissions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType

from moonpool.core.errors import InvalidRequest
from moonpool.scheduler.admission.baseline import Baseline
from moonpool.scheduler.admission.certain import Certain
from moonpool.scheduler.admission.early import Early
from moonpool.scheduler.admission.early_predicted import EarlyPredicted
from moonpool.scheduler.admission.moonpool import MoonpoolAdmission
from moonpool.scheduler.admission.none import Everything
from moonpool.scheduler.admission.policy import Admission

ADMISSIONS: Mapping[str, Callable[..., Admission]] = MappingProxyType(
    {kind.name: kind for kind in (Everything, Baseline, Early, EarlyPredicted, Certain, MoonpoolAdmission)}
)


def make_admission(name: str, settings: Mapping[str, float] = MappingProxyType({})) -> Admission:
    """Raises InvalidRequest for an unknown name or setting."""
    kind = ADMISSIONS.get(name)
    if kind is None:
        raise InvalidRequest(f"scheduler.admission: {name!r} is none of {', '.join(sorted(ADMISSIONS))}", param="admission")
    known = list(signature(kind).parameters)
    for setting, value in settings.items():
        if setting not in known:
            has = ", ".join(known) or "none"
            raise InvalidRequest(f"scheduler.admission_settings: {name} has no {setting!r}; it has {has}", param=setting)
        if not value >= 0.0:
            raise InvalidRequest(f"scheduler.admission_settings: {setting} is {value}; give 0 or more", param=setting)
    return kind(**settings)
