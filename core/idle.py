"""What a process's gauges say when nothing is in flight, whatever is cached. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Names as in ``Service.numbers``; each role has some of them.
IDLE_AT_ZERO = (
    "pages_used",
    "pages_publishing",
    "requests_running",
    "requests_filling",
    "requests_waiting",
    "requests_live",
    "requests_draining",
    "requests_in_flight",
    "handoffs",
    "slots_reserved",
    "slots_fenced",
    "reservations",
    "slices_pending",
    "landings_open",
    "tickets",
    "pins",
    "bookings",
    "waiting",
    "waiting_at_conductors",
    "placing",
    "held_body_bytes",
)


def not_idle(numbers: Mapping[str, float]) -> dict[str, float]:
    """The gauges of one process that are not at their idle value."""
    return {gauge: numbers[gauge] for gauge in IDLE_AT_ZERO if numbers.get(gauge, 0.0) != 0.0}


def is_idle(numbers: Mapping[str, float]) -> bool:
    """Nothing is queued, running, reserved, pinned or booked in the process that says ``numbers``."""
    return not not_idle(numbers)
