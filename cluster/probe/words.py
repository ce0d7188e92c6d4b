"""What the numbers of ``Service.numbers`` mean, and which of them only grow. Pure; for the HELP and TYPE of metrics."""

from __future__ import annotations

# Beside every name that ends with ``_count``. The rest are gauges: they go up and down.
_COUNTERS = frozenset(
    """
    admitted_to_measure answers_unclaimed bookings_ended_by_report bookings_expired bytes_landed bytes_sent
    cached_tokens_actual cached_tokens_mispredicted cached_tokens_predicted conductors_passed_over digest_mismatches
    drain_blocks_saved drain_bytes_saved endpoint_remakes event_gaps event_head events_ignored fetch_bytes_in
    fetch_bytes_out fetches_failed hand_overs_refused library_calls library_malformed library_refused
    lossy_copies_decoded lossy_copies_made metrics_errors moves_asked moves_blocks moves_bytes moves_cool moves_done
    moves_dropped moves_failed moves_left moves_prefetch moves_replicate placements reports_ignored role_switches
    spans_vacated store_watch_bad_frames store_watch_reconnects tcp_broken tcp_cut tcp_forged tcp_malformed tcp_refused
    ttft_above_prediction ttft_predicted watchers_cut workers_avoided writers_cut
    """.split()  # noqa: SIM905  one name a line would be a long page
)
_COUNTER_PREFIXES = ("refusals_", "bytes_landed_", "digest_mismatches_")

_MEANINGS = {
    "attempts_reported": "attempts that workers report as live",
    "blocks_evictable": "blocks that may be evicted now",
    "blocks_findable": "sealed blocks in DRAM that can be found",
    "blocks_indexed": "blocks of the pool that the conductor's index knows",
    "blocks_on_ssd": "blocks in the SSD tier",
    "bookings": "placements that are booked and not over",
    "bytes_landed": "KV bytes that were pushed here",
    "bytes_sent": "KV bytes that were pushed to others",
    "cancelled_count": "attempts or jobs that were cancelled",
    "conductors_passed_over": "times that a conductor said nothing in time, or was lost",
    "connections": "open HTTP connections",
    "decode_streams": "token streams open to decode workers",
    "digest_mismatches": "copies whose bytes differed from their digest",
    "event_gaps": "block events that were missed, and asked for again",
    "failed_count": "attempts that failed here",
    "handoffs": "hand-offs under way",
    "landings_open": "landings that are granted and not ended",
    "metrics_failed_count": "things that could not be counted, or told",
    "moved_count": "attempts that were given back while leaving",
    "metrics_errors": "times that a number could not be read, or be counted",
    "pages_cached": "device pages with cached blocks that nobody uses",
    "pages_free": "free device pages",
    "pages_total": "device pages",
    "pages_used": "device pages in use",
    "pins": "pins on blocks",
    "placements": "placements that were answered",
    "placing": "requests that ask, or wait for, a conductor",
    "preemptions_count": "sequences whose pages were taken, to be computed again",
    "process_handles": "open file descriptors",
    "process_python_threads": "threads that Python knows of",
    "process_resident_bytes": "resident memory",
    "process_sockets": "open sockets",
    "process_threads": "threads",
    "requests_filling": "attempts whose KV is coming in",
    "requests_in_flight": "choices being generated",
    "requests_live": "attempts or jobs held",
    "requests_running": "attempts or jobs that compute",
    "requests_waiting": "attempts or jobs that wait",
    "slots_fenced": "slots whose writer might still write",
    "slots_free": "free slots",
    "slots_reserved": "slots reserved for a writer",
    "slots_sealed": "slots with sealed blocks",
    "slots_total": "slots of the pool",
    "started_count": "attempts that were admitted",
    "steps_count": "decode steps",
    "store_connected": "1 while the session with this host's store node is open",
    "tickets": "read tickets",
    "tokens_count": "tokens that were generated",
    "waiting": "requests in the conductor's queue",
    "waiting_at_conductors": "requests that wait in a conductor's queue",
    "workers": "workers that the conductor knows",
    "probe_live": "1 while nothing stands still with work pending",
    "probe_ready": "1 while new work is wanted",
    "metrics_age_seconds": "how old these numbers are: more than a moment while the process's loop is busy",
}


def is_counter(name: str) -> bool:
    return name.endswith("_count") or name in _COUNTERS or name.startswith(_COUNTER_PREFIXES)


def meaning(name: str) -> str:
    return _MEANINGS.get(name) or name.removesuffix("_count").replace("_", " ")
