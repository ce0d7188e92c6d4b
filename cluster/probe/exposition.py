"""A process's numbers as Prometheus or OpenMetrics text. Names are ``moonpool_ROLE_NAME``; there is one process per page.

Values that only grow stay so for the process's whole life, also where a newer life of its service counts from zero again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from moonpool.cluster.probe.words import is_counter, meaning
from moonpool.core.membership import Member

PREFIX = "moonpool"


class Growing:
    """Counters over several lives of what counts them."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def total(self, name: str, value: float) -> float:
        last = self._last.get(name, 0.0)
        if value < last:
            self._base[name] = self._base.get(name, 0.0) + last
        self._last[name] = value
        return self._base.get(name, 0.0) + value


class Exposition:
    """One thread. ``own``: metrics that the service keeps itself, or None."""

    def __init__(self) -> None:
        self._growing = Growing()

    def render(
        self, member: Member, numbers: Mapping[str, float], own: CollectorRegistry | None, accept: str
    ) -> tuple[bytes, str]:
        """Text and content type, in the form that ``accept`` asks for."""
        page = _Page([*self._families(member, numbers), *(own.collect() if own is not None else ())])
        encode, kind = choose_encoder(accept)
        return encode(page), kind

    def _families(self, member: Member, numbers: Mapping[str, float]) -> Iterable[Metric]:
        role = member.role.value
        words = {"member": member.id, "role": role, "node": member.node, "model": member.model}
        yield InfoMetricFamily(f"{PREFIX}_process", "who this process is", value=words)
        for name, value in sorted(numbers.items()):
            yield self._family(role, name, float(value))

    def _family(self, role: str, name: str, value: float) -> Metric:
        whole = f"{PREFIX}_{name}" if name.startswith("process_") else f"{PREFIX}_{role}_{name}"
        if is_counter(name):
            return CounterMetricFamily(whole.removesuffix("_count"), meaning(name), value=self._growing.total(whole, value))
        return GaugeMetricFamily(whole, meaning(name), value=value)


class _Page:
    """What an encoder calls a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
