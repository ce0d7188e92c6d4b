"""The gateway's own metrics. Labels are bounded: endpoints and outcomes are closed sets, nothing comes from a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from moonpool.cluster.gateway.shapes import Usage
from moonpool.core.lifetime import Instant, Lifetime

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_log = structlog.get_logger()


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.errors = 0  # things that could not be counted, or told
        self._newest = b"", PLAIN
        self.requests = Counter(
            "moonpool_gateway_requests", "HTTP requests by how they ended", ["endpoint", "outcome"], registry=self.registry
        )
        self.in_flight = Gauge("moonpool_gateway_in_flight", "choices being generated", registry=self.registry)
        self.attempts = Counter("moonpool_gateway_attempts", "attempts begun", registry=self.registry)
        self.prompt_tokens = Counter("moonpool_gateway_prompt_tokens", "tokens of prompts", registry=self.registry)
        self.cached_tokens = Counter(
            "moonpool_gateway_cached_tokens", "prompt tokens that were not computed anew", registry=self.registry
        )
        self.output_tokens = Counter("moonpool_gateway_output_tokens", "tokens generated", registry=self.registry)
        self.ttft = self._histogram("ttft", "arrival to first token")
        self.tpot = self._histogram("tpot", "mean time per output token after the first")
        self.duration = self._histogram("request", "arrival to last token")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"moonpool_gateway_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def count(self, usage: Usage, attempts: int) -> None:
        """What one choice took, however it ended."""
        self.attempts.inc(attempts)
        self.prompt_tokens.inc(usage.prompt)
        self.cached_tokens.inc(usage.cached)
        self.output_tokens.inc(usage.completion)

    def finished(self, lifetime: Lifetime, tokens: int) -> None:
        """Latencies of a choice that was answered in full."""
        ttft = lifetime.between(Instant.ARRIVED, Instant.FIRST_TOKEN)
        whole = lifetime.between(Instant.ARRIVED, Instant.FINISHED)
        if ttft is not None and whole is not None:
            self.ttft.observe(ttft)
            self.duration.observe(whole)
            if tokens > 1:
                self.tpot.observe((whole - ttft) / (tokens - 1))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails inside is not counted, and that is all: nobody's request ends because of a metric."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  whatever it is
            self.errors += 1
            if self.errors in (1, 10, 100) or not self.errors % 1_000:
                _log.warning("metric not counted", times=self.errors, exc_info=e)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Text and content type, as OpenMetrics where ``accept`` asks for it; the newest page there is where one fails."""
        with self.guarded():
            encode, kind = choose_encoder(accept)
            self._newest = encode(self.registry), kind
        return self._newest
