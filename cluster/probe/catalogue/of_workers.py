"""What workers tell: ``moonpool_prefill_...`` and ``moonpool_decode_...``. Role both counts as decode worker."""

from __future__ import annotations

from moonpool.cluster.probe.catalogue.metric import Metric, by, counter, counters, gauge, gauges

CARRIERS = ("segment", "tcp", "ucx", "ucxx")

_PAGES: tuple[Metric, ...] = (
    gauge("page_capacity", "device pages (tier G1)", "pages_total"),
    gauges(
        "pages",
        "device pages by state; cached: with blocks that nobody uses now",
        "state",
        by("pages_*", "used", "free", "cached"),
    ),
)
_STORE = gauge("store_connected", "1 while the session with this host's store node is open")
_PREFIX = (
    "tokens of prompts by where their KV came from: device pages here (G1), this host's pool (G2 to G4), another node, or "
    "computed"
)

_PERMIT: tuple[Metric, ...] = (
    counter("permit_waits", "turns that another worker of this host held up", "permit_waits_count"),
    counter("permit_wait_seconds", "time that turns waited for the host's compute permit"),
    counter("permit_forced", "turns taken without the permit, because its holder did not move", "permit_forced_count"),
)

PREFILL = (
    *_PAGES,
    gauge("requests_live", "jobs held, until their bytes have left"),
    gauge("requests_waiting", "jobs that wait for their turn"),
    gauge("requests_running", "jobs that compute"),
    gauge("requests_draining", "jobs that are computed, and whose last bytes are on their way"),
    gauge("handoffs", "jobs that take in what another worker of their group computes"),
    counter("jobs", "jobs taken", "jobs_count"),
    counters(
        "jobs_ended_early", "jobs that were not computed to their end", "why", by("*_count", "cancelled", "refused", "moved")
    ),
    counter("jobs_skipped", "turns given up because there were no pages or no landing", "skips_count"),
    counter("prompt_tokens", "tokens of prompts that got their first token", "prompt_tokens_count"),
    counter("reused_tokens", "of these, those that were not computed", "reused_tokens_count"),
    counters("prefix_tokens", _PREFIX, "source", by("prefix_tokens_*_count", "device", "pool", "remote", "computed")),
    counter("span_tokens", "tokens of jobs' prompts that other workers of their group computed", "span_tokens_count"),
    counter(
        "spans_alone", "times that what another worker of the group should have sent was computed here", "spans_alone_count"
    ),
    counter("fetched_bytes", "bytes that jobs had fetched from other nodes", "fetched_bytes_count"),
    counter("late_fetches", "fetches that took so long that computing began", "late_fetches_count"),
    counter("fetched_ahead_tokens", "tokens fetched while those before them were computed", "fetched_ahead_tokens_count"),
    counter("fetched_late_tokens", "tokens computed though they were being fetched", "fetched_late_tokens_count"),
    counter(
        "prefix_blocks_lost", "loaded blocks that failed their digest, or ended with their session", "prefix_blocks_lost_count"
    ),
    *_PERMIT,
    counter("permit_passes", "times that it let a decode worker's step go first, between two layers", "permit_passes_count"),
    counters("sent_bytes", "KV bytes pushed to store nodes, by carrier", "carrier", by("bytes_sent_*", *CARRIERS)),
    _STORE,
)

DECODE = (
    *_PAGES,
    gauge("pages_publishing", "pages whose blocks are being copied to the pool"),
    gauge("requests_live", "attempts held"),
    gauge("requests_waiting", "attempts that wait for pages"),
    gauge("requests_filling", "attempts whose KV is coming in"),
    gauge("requests_running", "attempts in the running batch"),
    gauge("handoffs", "hand-offs under way"),
    gauge("streams", "token streams open to gateways"),
    counter("attempts", "attempts that were admitted", "started_count"),
    counters(
        "attempts_ended_early",
        "attempts that were not answered here to their end; moved: handed over while leaving",
        "why",
        by("*_count", "refused", "cancelled", "failed", "moved"),
    ),
    counter("tokens", "tokens that were generated", "tokens_count"),
    counter("steps", "decode steps", "steps_count"),
    counter("messages", "messages on token streams to gateways", "messages_count"),
    counter("preemptions", "sequences whose pages were taken, to be computed again", "preemptions_count"),
    counters("prefix_tokens", _PREFIX, "source", by("prefix_tokens_*_count", "device", "pool", "remote", "computed")),
    counter("blocks_published", "blocks of answers left in the pool", "blocks_published_count"),
    counter("blocks_mended", "blocks filled in again that the pool had lost", "blocks_mended_count"),
    counter("blocks_not_published", "blocks of answers that the pool did not take", "blocks_not_published_count"),
    *_PERMIT,
    gauge("blocks_behind_most", "blocks that the answer furthest behind has not published yet"),
    _STORE,
)
