"""Every metric that Moonpool tells, by the part of its name that says who tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.cluster.probe.catalogue.metric import Kind, Metric, kept
from moonpool.cluster.probe.catalogue.of_conductor import CONDUCTOR
from moonpool.cluster.probe.catalogue.of_gateway import GATEWAY, SECONDS
from moonpool.cluster.probe.catalogue.of_process import PROCESS
from moonpool.cluster.probe.catalogue.of_store import STORE
from moonpool.cluster.probe.catalogue.of_workers import DECODE, PREFILL
from moonpool.core.ids import Role

PROCESS_PART = "process"
STEP_SECONDS = kept("step_seconds", Kind.HISTOGRAM, "steps of requests' lives here", ("step",), SECONDS)

DECLARED: dict[str, tuple[Metric, ...]] = {
    PROCESS_PART: PROCESS,
    "gateway": (*GATEWAY, STEP_SECONDS),
    "conductor": (*CONDUCTOR, STEP_SECONDS),
    "prefill": (*PREFILL, STEP_SECONDS),
    "decode": (*DECODE, STEP_SECONDS),
    "store": (*STORE, STEP_SECONDS),
}

# In ``Service.numbers``, and told under another name, or as the sum of what is told.
TOLD_OTHERWISE = frozenset({"requests_in_flight", "threads", "bytes_landed", "bytes_sent"})


def part_of(role: Role) -> str:
    """A worker of role both tells what a decode worker tells."""
    return "decode" if role is Role.BOTH else role.value


def metrics() -> Iterator[tuple[str, Metric]]:
    """(part, metric) of every one."""
    for part, some in DECLARED.items():
        for metric in some:
            yield part, metric


def series_names() -> frozenset[str]:
    """Under which samples of Moonpool are stored."""
    return frozenset(name for part, metric in metrics() for name in metric.series(part))


def numbers_of(part: str) -> frozenset[str]:
    """Names in ``Service.numbers`` that are told by ``part``."""
    return frozenset(number for metric in DECLARED[part] for number in (metric.numbers or {}).values())


def table(part: str) -> str:
    """The metrics of ``part`` as a Markdown table, as docs/metrics.md has it."""
    rows = ["| name | type | unit | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in DECLARED[part]:
        rows.append(f"| `{metric.full_name(part)}` | {metric.kind} | {metric.unit} | {_labels(metric)} | {metric.text} |")
    return "\n".join(rows)


def _labels(metric: Metric) -> str:
    if not metric.labels:
        return ""
    if metric.numbers is None:
        return ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.labels[0]}`: {', '.join(metric.numbers)}"
