"""A process's numbers as Prometheus or OpenMetrics text, by the names of ``catalogue``; there is one process per page.

Values that only grow stay so for the process's whole life, also where a newer life of its service counts from zero again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from moonpool.cluster.probe.catalogue.declared import DECLARED, PROCESS_PART, TOLD_OTHERWISE, numbers_of, part_of
from moonpool.cluster.probe.catalogue.metric import PREFIX, Kind, Metric
from moonpool.core.membership import Member


class Growing:
    """Counters over several lives of what counts them."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def total(self, name: str, value: float | None) -> float:
        """``value`` None: it is not told at the moment, which is no new beginning."""
        last = self._last.get(name, 0.0)
        if value is None:
            value = last
        if value < last:
            self._base[name] = self._base.get(name, 0.0) + last
        self._last[name] = value
        return self._base.get(name, 0.0) + value


class Exposition:
    """One thread. ``own``: metrics that are counted elsewhere, to stand on the same page."""

    def __init__(self) -> None:
        self._growing = Growing()

    def render(
        self, member: Member, numbers: Mapping[str, float], own: Sequence[CollectorRegistry], accept: str
    ) -> tuple[bytes, str]:
        """Text and content type, in the form that ``accept`` asks for."""
        page = _Page([*self._families(member, numbers), *(family for one in own for family in one.collect())])
        encode, kind = choose_encoder(accept)
        return encode(page), kind

    def _families(self, member: Member, numbers: Mapping[str, float]) -> Iterable[Family]:
        part = part_of(member.role)
        words = {"member": member.id, "role": member.role.value, "node": member.node, "model": member.model}
        yield InfoMetricFamily(f"{PREFIX}_{PROCESS_PART}", "who this process is", value=words | {"version": member.version})
        for whose in (PROCESS_PART, part):
            for metric in DECLARED[whose]:
                if metric.numbers is not None and (family := self._family(whose, metric, numbers)) is not None:
                    yield family
        for name in sorted(numbers.keys() - numbers_of(PROCESS_PART) - numbers_of(part) - TOLD_OTHERWISE):
            yield GaugeMetricFamily(f"{PREFIX}_{part}_{name}", name.replace("_", " "), value=float(numbers[name]))

    def _family(self, part: str, metric: Metric, numbers: Mapping[str, float]) -> Family | None:
        """Counters begin at 0 before anything of their kind happened; a gauge that nobody sets is left out."""
        assert metric.numbers is not None
        told = {value: numbers.get(number) for value, number in metric.numbers.items()}
        whole, labels = f"{PREFIX}_{part}_{metric.name}", metric.labels
        if metric.kind is Kind.COUNTER:
            family: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(whole, metric.text, labels=labels)
            for value, number in told.items():
                total = self._growing.total(f"{whole} {value}", number)
                family.add_metric([value] if labels else [], total)
            return family
        family = GaugeMetricFamily(whole, metric.text, labels=labels)
        for value, number in told.items():
            if number is not None:
                family.add_metric([value] if labels else [], float(number))
        return family if family.samples else None


class _Page:
    """What an encoder calls a registry."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families
