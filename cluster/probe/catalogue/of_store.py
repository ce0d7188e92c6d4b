"""What a store node tells: ``moonpool_store_...``."""

from __future__ import annotations

from moonpool.cluster.probe.catalogue.metric import by, counter, counters, gauge, gauges
from moonpool.cluster.probe.catalogue.of_workers import CARRIERS

PLACES = ("landing", "prefix_load", "ssd", "shared", "codec", "library")

_POOL = (
    gauge("slot_capacity", "slots of the pool (tier G2)", "slots_total"),
    gauges(
        "slots",
        "slots by state; fenced: their writer might still write, so they wait for proof that it does not",
        "state",
        by("slots_*", "free", "reserved", "fenced", "sealed"),
    ),
    gauge("pool_bytes", "DRAM of the pool"),
    gauge("pool_free_bytes", "of it, free"),
    gauge("pool_evictable_bytes", "of it, what making room could give beside what is free"),
    gauge("pool_clean_bytes", "of it, blocks that are on SSD, too"),
    gauge("pins", "pins on blocks: they cannot be evicted"),
    gauge("blocks_findable", "sealed blocks that can be found, in DRAM or on SSD"),
    gauge("blocks_evictable", "blocks in DRAM that may be evicted now"),
    gauge("blocks_on_ssd", "blocks in the SSD tier"),
    gauge("layouts", "KV layouts whose blocks may be stored"),
    gauge("landings_open", "landings that are granted and not ended"),
    gauge("tickets", "read tickets"),
    gauge("reservations", "slots reserved for blocks that workers copy here"),
    gauges("held_bytes", "bytes kept by name", "pin", {"hard": "held_hard_bytes", "soft": "held_soft_bytes"}),
    gauges("held_blocks", "blocks kept by name", "pin", {"hard": "held_hard_blocks", "soft": "held_soft_blocks"}),
    counter("evicted_blocks", "blocks evicted from DRAM", "evicted"),
    counter("cooled_blocks", "blocks moved to the front of eviction on a conductor's word", "cooled"),
    counter("spans_vacated", "spans of the pool emptied to hold blocks of another size"),
    counters(
        "prefix_tokens",
        "tokens of prefixes that readers of this host found in its pool, by the tier they lay in",
        "tier",
        by("prefix_tokens_*_count", "dram", "ssd", "shared"),
    ),
    counter("digest_mismatches", "copies whose bytes differed from their digest"),
    counters("digest_mismatches_at", "of these, by where it was found", "place", by("digest_mismatches_*", *PLACES)),
    counter("quarantined_blocks", "copies made unfindable because of that", "quarantined"),
    counters(
        "notices_lost",
        "notices of pushed slices that could not be read, found no room, or came too late",
        "why",
        {"malformed": "notices_malformed", "dropped": "notices_dropped", "ignored": "notices_ignored"},
    ),
    counter("slices_repeated", "slices that were pushed again"),
    counter("slices_late", "slices that came after their landing had ended"),
    counter("seals_lost", "blocks that were whole but could not be sealed: their parent was evicted", "seals_lost"),
    counter("seals_dropped", "blocks that were sealed but somebody else's copy was first", "seals_dropped"),
    counters(
        "late_calls",
        "calls about what had ended already",
        "about",
        {
            "drain": "drains_ignored",
            "unpin": "unpins_ignored",
            "demotion": "demotions_ignored",
            "promotion": "promotions_ignored",
            "reservation": "reservations_unknown",
        },
    ),
    counter("event_head", "number of the newest block event"),
    gauge("slices_pending", "landed slices that wait to be verified"),
    gauges(
        "ladder_open", "blocks on their way between DRAM and SSD", "way", {"down": "demotions_open", "up": "promotions_open"}
    ),
)

_LINKS = (
    counters(
        "landed_bytes", "KV bytes that were pushed here and verified, by carrier", "carrier", by("bytes_landed_*", *CARRIERS)
    ),
    counters("sent_bytes", "KV bytes pushed to other nodes, by carrier", "carrier", by("bytes_sent_*", *CARRIERS)),
    counters(
        "fetched_bytes",
        "KV bytes of fetches: in for readers here, out for readers elsewhere",
        "direction",
        {"in": "fetch_bytes_in", "out": "fetch_bytes_out"},
    ),
    gauge("fetches_open", "fetches from other nodes under way"),
    counter("fetches_failed", "fetches that gave less than was asked for, or nothing"),
    counter("fetches_not_tried", "fetches from nodes that failed lately"),
    counter("endpoint_remakes", "times that the carrier's endpoint was made anew, to free fenced slots"),
    gauge("endpoint_generation", "the life of the carrier's endpoint"),
    counter("writers_cut", "writers that were cut off, to free fenced slots"),
    gauge("receiver_open", "landings for which the carrier polls"),
    gauge("tcp_connections", "connections of writers by TCP"),
    counters(
        "tcp_faults",
        "connections by TCP: refused, malformed, forged, broken, cut",
        "kind",
        by("tcp_*", "refused", "malformed", "forged", "broken", "cut"),
    ),
    gauge("ucxx_connections", "connections of writers by UCX (two-sided)"),
    counters(
        "ucxx_faults",
        "connections by UCX (two-sided): refused, malformed, broken",
        "kind",
        by("ucxx_*", "refused", "malformed", "broken"),
    ),
    gauge("sessions", "workers of this host that are connected"),
    gauge("pidfds", "processes of this host that are watched"),
    gauge("watchers", "conductors that hear of blocks"),
    counter("watchers_cut", "conductors cut off because they were too slow"),
    counter("hand_overs_refused", "processes that could not be watched"),
)

_SSD = (
    gauge("ssd_bytes", "size of the SSD tier (G3)"),
    gauges(
        "ssd_extents",
        "places for blocks on SSD; unknown: of layouts that nobody registered",
        "state",
        {"used": "ssd_extents", "free": "ssd_extents_free", "unknown": "ssd_extents_unknown"},
    ),
    gauges(
        "ssd_segments",
        "files of the SSD tier: all, blank, and retired after errors",
        "state",
        {"all": "ssd_segments", "blank": "ssd_segments_blank", "retired": "ssd_segments_retired"},
    ),
    counter("ssd_read_bytes", "bytes read from SSD", "ssd_bytes_read"),
    counter("ssd_read_direct_bytes", "of these, past the page cache", "ssd_bytes_read_direct"),
    counter("ssd_written_bytes", "bytes written to SSD", "ssd_bytes_written"),
    counter("ssd_compacted_bytes", "bytes moved within the SSD tier", "ssd_bytes_compacted"),
    gauge("ssd_queue", "reads and writes that wait"),
    gauge("ssd_write_backlog", "sealed blocks that wait to be written through"),
    counters(
        "ssd_blocks",
        "blocks written to SSD, and moved there",
        "what",
        {"written": "ssd_blocks_written", "moved": "ssd_blocks_moved"},
    ),
    counters("ssd_reads", "reads of blocks by how they ended", "end", by("ssd_reads_*", "ok", "gone", "torn", "late")),
    counters(
        "ssd_mismatches",
        "blocks on SSD that differed from their digest, by when that was noticed",
        "at",
        by("ssd_mismatches_*", "write", "read", "move", "start"),
    ),
    counters(
        "ssd_errors",
        "errors of the SSD",
        "of",
        {
            "read": "ssd_read_errors",
            "write": "ssd_write_errors",
            "erase": "ssd_erase_failed",
            "writes_given_up": "ssd_writes_failed",
        },
    ),
    counters(
        "ssd_lost", "extents and files that were lost", "what", {"extents": "ssd_extents_lost", "segments": "ssd_segments_lost"}
    ),
    counters(
        "ssd_not_written",
        "blocks that were not written",
        "why",
        {
            "unfit": "ssd_writes_unfit",
            "without_room": "ssd_writes_without_room",
        },
    ),
    counters(
        "ssd_segments_done",
        "files formatted, and compacted",
        "what",
        {
            "formatted": "ssd_segments_formatted",
            "compacted": "ssd_segments_compacted",
        },
    ),
    counter("ssd_extents_forgotten", "blocks given up with the file they were in"),
    counters(
        "ssd_at_start",
        "blocks found at the start: verified, orphans, second copies",
        "what",
        {
            "verified": "ssd_verified_at_start",
            "orphans": "ssd_orphans_at_start",
            "duplicates": "ssd_duplicates_at_start",
        },
    ),
)

_SHARED = (
    gauge("shared_readable", "1 while the shared tier (G4) is read from"),
    gauge("shared_writable", "1 while the shared tier is written to"),
    gauge("shared_outstanding", "operations on the shared tier under way"),
    gauge("shared_write_backlog", "sealed blocks that wait to be written there"),
    counter("shared_read_bytes", "bytes read from the shared tier", "shared_bytes_read"),
    counter("shared_written_bytes", "bytes written to the shared tier", "shared_bytes_written"),
    counters(
        "shared_blocks",
        "blocks written there, there already, erased",
        "what",
        {
            "written": "shared_blocks_written",
            "there_already": "shared_blocks_there_already",
            "erased": "shared_erased",
        },
    ),
    counters("shared_reads", "reads of objects by how they ended", "end", by("shared_reads_*", "ok", "gone", "torn", "late")),
    counters(
        "shared_not_written",
        "objects that were not written",
        "why",
        {
            "mismatch": "shared_mismatches_write",
            "unfit": "shared_writes_unfit",
            "late": "shared_writes_late",
        },
    ),
    counter("shared_faults", "times that the shared tier failed, and was left alone for a while"),
    counters(
        "shared_refused",
        "operations that were not tried",
        "why",
        {
            "pause": "shared_refused_in_pause",
            "full": "shared_refused_full",
        },
    ),
)

_REST = (
    gauge("leaving", "1 while it takes nothing new and moves blocks out"),
    counter("drain_saved_blocks", "blocks moved out while leaving", "drain_blocks_saved"),
    counter("drain_saved_bytes", "bytes moved out while leaving", "drain_bytes_saved"),
    gauge("drain_left_blocks", "blocks that nobody else holds and that were not moved out", "drain_blocks_left"),
    gauge("drain_left_bytes", "bytes of these", "drain_bytes_left"),
    counter("heat_copies", "copies made because other nodes read them often"),
    counter("heat_copied_bytes", "bytes of these", "heat_bytes"),
    gauge("heat_blocks", "blocks whose reads by other nodes are counted"),
    counter("lossy_copies_made", "lossy copies made"),
    counter("lossy_copies_decoded", "lossy copies that served a reader"),
    gauge("library_clients", "users of the store library on this host"),
    counter("library_calls", "calls of these"),
    counter("library_refused", "of these, refused"),
    counter("library_malformed", "of these, malformed: each ended its connection"),
)

STORE = (*_POOL, *_LINKS, *_SSD, *_SHARED, *_REST)
