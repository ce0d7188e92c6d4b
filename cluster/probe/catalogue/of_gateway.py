"""What a gateway tells: ``moonpool_gateway_...``. Those counted in ``gateway.metrics`` are on its own port, too."""

from __future__ import annotations

from moonpool.cluster.probe.catalogue.metric import Kind, Metric, counter, counters, gauge, kept

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAPS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 5, 10)
TRIES = (1, 2, 3, 4, 6, 10)


def _seconds(name: str, text: str) -> Metric:
    return kept(f"{name}_seconds", Kind.HISTOGRAM, text, ("model",), SECONDS)


REQUESTS = kept("requests", Kind.COUNTER, "HTTP requests by how they ended", ("endpoint", "model", "outcome"))
REFUSALS = kept("refusals", Kind.COUNTER, "HTTP requests that were refused for now, by why", ("model", "reason"))
IN_FLIGHT = kept("in_flight", Kind.GAUGE, "choices being generated or waiting to be")
ATTEMPTS = kept("attempts", Kind.COUNTER, "attempts begun")
ATTEMPT_FAILURES = kept("attempt_failures", Kind.COUNTER, "attempts that failed once placed, by why", ("reason",))
RESUMES = kept("resumes", Kind.COUNTER, "attempts begun after ids had been streamed: the answer goes on elsewhere")
PROMPT_TOKENS = kept("prompt_tokens", Kind.COUNTER, "tokens of prompts", ("model",))
CACHED_TOKENS = kept("cached_tokens", Kind.COUNTER, "prompt tokens that were not computed anew", ("model",))
OUTPUT_TOKENS = kept("output_tokens", Kind.COUNTER, "tokens generated", ("model",))
GOODPUT = kept(
    "targeted_requests",
    Kind.COUNTER,
    "choices that carried a latency target and did not leave by themselves: met every one, missed one, refused or failed",
    ("model", "result"),
)
TTFT = _seconds("ttft", "arrival to first token, of choices answered in full")
TPOT = _seconds("tpot", "mean time per output token after the first")
TBT = kept("tbt_seconds", Kind.HISTOGRAM, "mean of the slowest tenth of a choice's gaps between tokens", ("model",), GAPS)
ITL = kept("itl_seconds", Kind.HISTOGRAM, "gap before each token after the first", ("model",), GAPS)
DURATION = _seconds("request", "arrival to last token, of choices answered in full")
TRIES_EACH = kept("attempts_per_request", Kind.HISTOGRAM, "attempts that a choice took, however it ended", (), TRIES)
PREDICTION = kept(
    "prediction_ratio",
    Kind.HISTOGRAM,
    "actual time over the conductor's prediction, of attempts that answered: ttft from placement on, tbt",
    ("of",),
    RATIOS,
)
TENANT_REQUESTS = kept(
    "tenant_requests", Kind.COUNTER, "HTTP requests by tenant and how they ended; with API keys", ("tenant", "outcome")
)
TENANT_TOKENS = kept(
    "tenant_tokens", Kind.COUNTER, "tokens by tenant: prompt, cached of these, output; with API keys", ("tenant", "kind")
)

COUNTED = (
    REQUESTS,
    REFUSALS,
    IN_FLIGHT,
    ATTEMPTS,
    ATTEMPT_FAILURES,
    RESUMES,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    OUTPUT_TOKENS,
    GOODPUT,
    TTFT,
    TPOT,
    TBT,
    ITL,
    DURATION,
    TRIES_EACH,
    PREDICTION,
    TENANT_REQUESTS,
    TENANT_TOKENS,
)

GATEWAY = (
    *COUNTED,
    gauge("placing", "requests that ask, or wait for, a conductor"),
    gauge("waiting_at_conductors", "requests that wait in a conductor's queue"),
    counter("conductors_passed_over", "times that a conductor said nothing in time, or was lost"),
    gauge("workers_avoided", "workers left out of placements because they keep failing"),
    gauge("decode_streams", "token streams open to decode workers"),
    gauge("connections", "open HTTP connections"),
    gauge("held_body_bytes", "bodies of requests in flight"),
    gauge("models_without_path", "models served here that have no path from prompt to tokens at the moment"),
    counters(
        "usage_lines",
        "lines of the usage log: written, or dropped since queue or disk were full",
        "result",
        {"written": "usage_lines_written", "dropped": "usage_lines_dropped"},
    ),
    counter("uncounted", "things that could not be counted", "metrics_failed_count"),
    counters(
        "connections_cut",
        "connections that were refused or cut off: too many, a request's head too slow or too large, an answer not taken",
        "why",
        {
            "too_many": "connections_refused_count",
            "slow_head": "slow_heads_cut_count",
            "large_head": "large_heads_cut_count",
            "slow_reader": "slow_readers_cut_count",
        },
    ),
)
