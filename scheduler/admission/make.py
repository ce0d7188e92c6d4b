"""Admissions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moonpool.scheduler.admission.baseline import Baseline
from moonpool.scheduler.admission.certain import Certain
from moonpool.scheduler.admission.early import Early
from moonpool.scheduler.admission.early_predicted import EarlyPredicted
from moonpool.scheduler.admission.moonpool import MoonpoolAdmission
from moonpool.scheduler.admission.none import Everything
from moonpool.scheduler.admission.policy import Admission
from moonpool.scheduler.by_name import made

ADMISSIONS: Mapping[str, Callable[..., Admission]] = MappingProxyType(
    {kind.name: kind for kind in (Everything, Baseline, Early, EarlyPredicted, Certain, MoonpoolAdmission)}
)


def make_admission(name: str, settings: Mapping[str, float] = MappingProxyType({})) -> Admission:
    """See ``by_name.made``."""
    return made("admission", ADMISSIONS, name, settings)
