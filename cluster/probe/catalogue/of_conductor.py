"""What a conductor tells: ``moonpool_conductor_...``."""

from __future__ import annotations

from moonpool.cluster.probe.catalogue.metric import by, counter, counters, gauge

CONDUCTOR = (
    gauge("waiting", "requests in its queue"),
    counter("placements", "placements that were answered"),
    counters("refusals", "requests it refused, by why", "reason", by("refusals_*", "no_path", "targets_missed", "overloaded")),
    counter("admitted_to_measure", "requests let in against the estimate, to measure again"),
    gauge("leading_term", "the term in which it leads; 0: it does not"),
    gauge("workers", "workers it knows"),
    gauge("store_nodes", "store nodes it knows"),
    gauge("blocks_indexed", "blocks of the pool that its index knows"),
    gauge("device_blocks_indexed", "blocks in workers' device pages that its index knows"),
    gauge("bookings", "placements that are booked and not over"),
    gauge("booked_prefill_seconds", "predicted work that is booked at prefill workers"),
    gauge("booked_context_tokens", "tokens that are booked at decode workers"),
    gauge("attempts_reported", "attempts that workers report as live"),
    counter("bookings_expired", "bookings dropped because their request's time was over"),
    counter("bookings_ended_by_report", "bookings ended because their worker no longer reports them"),
    counter("reports_ignored", "reports of workers' former lives"),
    counter("events_ignored", "block events of store nodes' former lives"),
    counter("event_gaps", "block events that were missed, and asked for again"),
    counters(
        "cached_tokens",
        "prompt tokens predicted to be cached, and those that were, of attempts that reported",
        "of",
        {"predicted": "cached_tokens_predicted", "actual": "cached_tokens_actual"},
    ),
    counter("cached_tokens_mispredicted", "answers whose cached tokens were off by a block or more"),
    counter("ttft_predicted", "first attempts whose time to first token was predicted for sure"),
    counter("ttft_above_prediction", "of these, those that took longer than the prediction's upper end"),
    gauge("first_token_overhead_seconds", "learned: what a first token takes beside computing it"),
    gauge("decisions_recorded", "decisions that `explain` finds"),
    counters(
        "moves",
        "copies, prefetches and coolings, by what became of them; left: to the conductor that leads",
        "stage",
        by("moves_*", "asked", "done", "failed", "dropped", "left"),
    ),
    counters("moves_by_kind", "moves that were done, by kind", "kind", by("moves_*", "replicate", "prefetch", "cool")),
    counter("moved_blocks", "blocks that moves brought", "moves_blocks"),
    counter("moved_bytes", "bytes that moves brought", "moves_bytes"),
    gauge("moves_running", "moves under way"),
    gauge("moves_queued", "moves that wait"),
    counter("role_switches", "changes of workers' roles that it began"),
    counter("answers_unclaimed", "late answers that nobody waited for any more"),
    gauge("store_watches_connected", "store nodes whose events it hears"),
    counter("store_watch_reconnects", "times that a store node's events broke off"),
    counter("store_watch_bad_frames", "frames of store nodes' events that could not be read"),
)
