"""Spans of the requests that end in this process, to an OpenTelemetry collector. Imported only where traces are wanted.

Each process sends its own spans: the gateway the request, its steps and attempts; the others one span per attempt with its
steps. Instants are of this process's monotonic clock and become wall-clock times here, so that spans of two machines are as
far apart as their clocks are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from moonpool import __version__
from moonpool.cluster.probe.catalogue.declared import part_of
from moonpool.cluster.probe.catalogue.steps import told
from moonpool.cluster.tracing.ids import CLIENT_SPAN, TraceOf, span_id, trace_of
from moonpool.core.ids import MemberId, Role
from moonpool.core.lifetime import Lifetime

PATH = "/v1/traces"
EXPORT_S = 5.0  # for one batch to reach the collector
DELAY_MS = 1_000
QUEUE = 8_192  # spans; more are dropped, the oldest first
GOOD = ("ok", "")

_log = structlog.get_logger()

Facts = Mapping[str, str | int | float]


class _Given(IdGenerator):
    """Gives out the ids that were put here for the span about to be made."""

    def __init__(self) -> None:
        self.trace, self.span = 0, 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class Counted(SpanExporter):
    """Counts the batches that no collector took, and complains of some of them: it may be away for days."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += 1
            if self.lost in (1, 10, 100) or not self.lost % 1_000:
                _log.warning("spans not sent", times=self.lost, spans=len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Spans:
    """Event-loop only; what is sent is sent by a thread of the library."""

    def __init__(
        self,
        provider: TracerProvider,
        ids: _Given,
        exporter: Counted,
        share: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._provider, self._ids, self._exporter, self._share, self._wall = provider, ids, exporter, share, wall
        self._tracer = provider.get_tracer("moonpool", __version__)

    @classmethod
    def to(cls, endpoint: str, share: float, cluster: str, member: MemberId) -> Spans:
        """``endpoint``: the collector's URL; without a path ``/v1/traces`` is meant."""
        ids = _Given()
        resource = Resource.create(
            {
                "service.name": "moonpool",
                "service.namespace": cluster,
                "service.instance.id": member,
                "service.version": __version__,
            }
        )
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=ids, shutdown_on_exit=False)
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says something about every batch
        exporter = Counted(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S))
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS))
        return cls(provider, ids, exporter, share)

    def numbers(self) -> dict[str, float]:
        return {"trace_batches_lost": float(self._exporter.lost)}

    def close(self) -> None:
        """Blocks until what there is has been sent, or cannot be."""
        self._provider.shutdown()

    def ended(self, role: Role, request: str, attempt: int, life: Lifetime) -> None:
        """A life of ``request`` is over here."""
        trace = trace_of(request)
        if trace is None or not life.at or not trace.sampled(self._share):
            return
        book = _Book(self, trace, request, self._wall() - time.monotonic())
        if role is Role.GATEWAY:
            book.of_gateway(life)
        else:
            book.of_attempt(role, attempt, life)

    def send(self, trace: int, span: int, parent: int, name: str, begin_ns: int, end_ns: int, facts: Facts, bad: str) -> None:
        """``parent`` 0: none. ``bad``: why what it stands for failed."""
        self._ids.trace, self._ids.span = trace, span
        context = Context()
        if parent:
            above = SpanContext(trace, parent, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(above), context)
        made = self._tracer.start_span(name, context, attributes=dict(facts), start_time=begin_ns)
        if bad:
            made.set_status(Status(StatusCode.ERROR, bad))
        made.end(end_ns)


class _Book:
    """Of one request in one process. ``offset_s`` makes instants of this process times of the wall clock."""

    def __init__(self, spans: Spans, trace: TraceOf, request: str, offset_s: float) -> None:
        self._spans, self._trace, self._request, self._offset_s = spans, trace, request, offset_s

    def of_gateway(self, life: Lifetime) -> None:
        """The request; of several choices each one below it, and the request itself with the first of them."""
        begin, end = min(life.at.values()), max(life.at.values())
        facts = {name: fact for name, fact in life.facts.items() if name != CLIENT_SPAN}
        bad = _bad(life.facts)
        above = self._trace.root
        if not self._trace.choice:
            client = int(str(life.facts.get(CLIENT_SPAN, "0")), 16) if self._trace.by_client else 0
            self._send(above, client, "request", begin, end, facts, bad)
        if self._trace.choice is not None:
            parent, above = above, span_id(self._request, 0, "choice")
            self._send(above, parent, f"choice {self._trace.choice}", begin, end, facts, bad)
        self._steps(Role.GATEWAY, 0, life, above)
        for one in life.tries:
            span = span_id(self._request, one.number, "attempt")
            facts = {"moonpool.attempt": one.number, **one.facts}
            self._send(span, above, f"attempt {one.number}", one.begun, max(one.ended, one.begun), facts, _bad(one.facts))

    def of_attempt(self, role: Role, attempt: int, life: Lifetime) -> None:
        begin, end = min(life.at.values()), max(life.at.values())
        name = part_of(role)
        span = span_id(self._request, attempt, name)
        parent = span_id(self._request, attempt, "attempt")
        self._send(span, parent, name, begin, end, {"moonpool.attempt": attempt, **life.facts}, _bad(life.facts))
        self._steps(role, attempt, life, span)

    def _steps(self, role: Role, attempt: int, life: Lifetime, above: int) -> None:
        for step, begin, end in told(role, life):
            span = span_id(self._request, attempt, f"{part_of(role)}.{step.name}")
            self._send(span, above, f"{part_of(role)}.{step.name}", begin, end, {"moonpool.step": step.number}, "")

    def _send(self, span: int, parent: int, name: str, begin: float, end: float, facts: Facts, bad: str) -> None:
        named = {key if "." in key else f"moonpool.{key}": fact for key, fact in facts.items()}
        named["moonpool.request"] = self._request
        self._spans.send(self._trace.trace, span, parent, name, self._ns(begin), self._ns(end), named, bad)

    def _ns(self, instant: float) -> int:
        return int((instant + self._offset_s) * 1e9)


def _bad(facts: Facts) -> str:
    outcome = str(facts.get("outcome", ""))
    return "" if outcome in GOOD else outcome
