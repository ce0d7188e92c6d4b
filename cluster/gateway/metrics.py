"""The gateway's own metrics, as ``probe.catalogue.of_gateway`` declares them. No label comes from a client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from moonpool.cluster.gateway.shapes import Usage
from moonpool.cluster.probe.catalogue import of_gateway as declared
from moonpool.cluster.probe.catalogue.metric import PREFIX, Metric
from moonpool.core.errors import Reason
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.request import Targets

PART = f"{PREFIX}_gateway_"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
REFUSALS = (Reason.TARGETS_MISSED, Reason.OVERLOADED, Reason.RATE_LIMITED, Reason.NO_PATH)
FAILURES = (Reason.BUSY, Reason.MOVED, Reason.PEER_SILENT, Reason.TRANSFER_FAILED, Reason.DIGEST_MISMATCH, Reason.DEADLINE)
ENDPOINTS = ("chat", "completions")
_log = structlog.get_logger()


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(PART + metric.name, metric.text, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(PART + metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=registry)


class Gaps:
    """A histogram by model that is cheap enough for every token. Counted by one thread, read by any."""

    def __init__(self, metric: Metric, models: Sequence[str], registry: CollectorRegistry) -> None:
        self._metric = metric
        self.of = {model: GapCounts(metric.buckets) for model in models}
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(PART + self._metric.name, self._metric.text, labels=self._metric.labels)
        for model, counts in self.of.items():
            family.add_metric([model], counts.buckets(), counts.seconds)
        yield family


class GapCounts:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        up_to = accumulate(list(self._counts))
        names = (*map(floatToGoString, self._bounds), "+Inf")
        return [(name, float(n)) for name, n in zip(names, up_to, strict=True)]


class Metrics:
    """``models``: names of those that are served; what no model was found for is counted under an empty name."""

    def __init__(self, models: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self.errors = 0  # things that could not be counted, or told
        self._newest = b"", PLAIN
        own = self.registry
        self.requests = counter(declared.REQUESTS, own)
        self.refusals = counter(declared.REFUSALS, own)
        self.in_flight = Gauge(PART + declared.IN_FLIGHT.name, declared.IN_FLIGHT.text, registry=own)
        self.attempts = counter(declared.ATTEMPTS, own)
        self.attempt_failures = counter(declared.ATTEMPT_FAILURES, own)
        self.resumes = counter(declared.RESUMES, own)
        self.prompt_tokens = counter(declared.PROMPT_TOKENS, own)
        self.cached_tokens = counter(declared.CACHED_TOKENS, own)
        self.output_tokens = counter(declared.OUTPUT_TOKENS, own)
        self.targeted = counter(declared.GOODPUT, own)
        self.ttft = histogram(declared.TTFT, own)
        self.tpot = histogram(declared.TPOT, own)
        self.tbt = histogram(declared.TBT, own)
        self.gaps = Gaps(declared.ITL, models, own)
        self.duration = histogram(declared.DURATION, own)
        self.tries = histogram(declared.TRIES_EACH, own)
        self.prediction = histogram(declared.PREDICTION, own)
        self._begin_at_zero(models)

    def _begin_at_zero(self, models: Sequence[str]) -> None:
        """A series that appears with its first event cannot be told from one that never was: rates would miss that event."""
        for model in models:
            for endpoint in ENDPOINTS:
                self.requests.labels(endpoint, model, "ok")
            for reason in REFUSALS:
                self.refusals.labels(model, reason.value)
            for result in ("met", "missed", "refused", "failed"):
                self.targeted.labels(model, result)
            for one in (self.ttft, self.tpot, self.tbt, self.duration):
                one.labels(model)
            for tokens in (self.prompt_tokens, self.cached_tokens, self.output_tokens):
                tokens.labels(model)
        for reason in FAILURES:
            self.attempt_failures.labels(reason.value)
        for of in ("ttft", "tbt"):
            self.prediction.labels(of)

    def left(self, endpoint: str, model: str, outcome: str) -> None:
        """An HTTP request, however it ended."""
        self.requests.labels(endpoint, model, outcome).inc()
        if outcome in REFUSALS:
            self.refusals.labels(model, outcome).inc()

    def count(self, model: str, usage: Usage, attempts: int) -> None:
        """What one choice took, however it ended."""
        self.attempts.inc(attempts)
        self.prompt_tokens.labels(model).inc(usage.prompt)
        self.cached_tokens.labels(model).inc(usage.cached)
        self.output_tokens.labels(model).inc(usage.completion)
        if attempts:
            self.tries.observe(attempts)

    def finished(self, model: str, lifetime: Lifetime, tokens: int, tbt_s: float) -> None:
        """Latencies of a choice that was answered in full; ``tbt_s`` 0: it had no gaps."""
        ttft = lifetime.between(Instant.ARRIVED, Instant.FIRST_TOKEN)
        whole = lifetime.between(Instant.ARRIVED, Instant.FINISHED)
        if ttft is not None and whole is not None:
            self.ttft.labels(model).observe(ttft)
            self.duration.labels(model).observe(whole)
            if tokens > 1:
                self.tpot.labels(model).observe((whole - ttft) / (tokens - 1))
                self.tbt.labels(model).observe(tbt_s)

    def judge(self, model: str, targets: Targets, outcome: str, lifetime: Lifetime, tbt_s: float) -> None:
        """Whether a choice with targets met them. One whose client left counts neither way."""
        if (targets.ttft_ms is None and targets.tbt_ms is None) or outcome == Reason.CANCELLED:
            return
        if outcome != "ok":
            refused = outcome in REFUSALS and Instant.FIRST_TOKEN not in lifetime.at
            self.targeted.labels(model, "refused" if refused else "failed").inc()
            return
        ttft = lifetime.between(Instant.ARRIVED, Instant.FIRST_TOKEN) or 0.0
        late = targets.ttft_ms is not None and ttft * 1e3 > targets.ttft_ms
        slow = targets.tbt_ms is not None and tbt_s * 1e3 > targets.tbt_ms
        self.targeted.labels(model, "missed" if late or slow else "met").inc()

    def watch(self, model: str) -> ModelWatch:
        """For the attempts of one request."""
        return ModelWatch(self, self.gaps.of[model])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails inside is not counted, and that is all: nobody's request ends because of a metric."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  whatever it is
            self.not_counted(e)

    def not_counted(self, error: Exception) -> None:
        self.errors += 1
        if self.errors in (1, 10, 100) or not self.errors % 1_000:
            _log.warning("metric not counted", times=self.errors, exc_info=error)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Text and content type, as OpenMetrics where ``accept`` asks for it; the newest page there is where one fails."""
        with self.guarded():
            encode, kind = choose_encoder(accept)
            self._newest = encode(self.registry), kind
        return self._newest


class ModelWatch:
    """Implements ``attempts.Watch``: called while requests are served."""

    def __init__(self, metrics: Metrics, gaps: GapCounts) -> None:
        self._metrics, self._gaps = metrics, gaps

    def gap(self, seconds: float) -> None:
        try:
            self._gaps.observe(seconds)
        except Exception as e:  # noqa: BLE001  as in ``guarded``, which would cost more than the rest
            self._metrics.not_counted(e)

    def failed(self, reason: Reason) -> None:
        with self._metrics.guarded():
            self._metrics.attempt_failures.labels(reason.value).inc()

    def resumed(self) -> None:
        with self._metrics.guarded():
            self._metrics.resumes.inc()

    def predicted(self, of: str, actual_s: float, predicted_s: float) -> None:
        if actual_s > 0 and predicted_s > 0:  # 0: not predicted, or no gaps
            with self._metrics.guarded():
                self._metrics.prediction.labels(of).observe(actual_s / predicted_s)
