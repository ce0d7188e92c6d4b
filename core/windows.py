"""In which window of a request's life a cancellation struck, by the instants that the processes stamped themselves. Pure.

A cancellation travels: gateway, decode worker, prefill worker. What counts is where the request stood when it reached
the process that held it. All instants must come from one machine's monotonic clock.
"""

from __future__ import annotations

from enum import StrEnum

from moonpool.core.lifetime import Instant, Lifetime


class Window(StrEnum):
    QUEUED = "queued"  # at the gateway, or in a conductor's queue
    PLACED = "placed"  # a placement is known; it waits at the decode worker or in the prefill worker's queue
    RESERVING = "reserving"  # its landing is asked for
    LOADING = "loading"  # its prefix comes from the pool, an SSD or another node
    PREFILLING = "prefilling"
    PUSHING = "pushing"  # all is computed, not all has landed
    SEALED = "sealed"  # all has landed, and it is not in the running batch yet
    DECODING = "decoding"


NAMES = tuple(window.value for window in Window)


def window_of(gateway: Lifetime, decode: Lifetime | None, prefill: Lifetime | None, store: Lifetime | None) -> Window | None:
    """None: it was not cancelled, or all was over when the cancellation came.

    ``decode``, ``prefill`` and ``store`` (its landing) are of the attempt that the gateway cancelled; None where that
    process never heard of it.
    """
    struck = gateway.at.get(Instant.CANCELLED)
    if struck is None:
        return None
    if Instant.PLACED not in gateway.at:
        return Window.QUEUED
    if decode is None:
        return Window.PLACED
    reached = decode.at.get(Instant.CANCELLED)
    if reached is None:
        return None
    if Instant.RUNNABLE in decode.at:
        return Window.DECODING
    if Instant.QUEUED not in decode.at or prefill is None:
        return Window.PLACED
    return _while_filling(reached, decode, prefill, store)


def _while_filling(reached: float, decode: Lifetime, prefill: Lifetime, store: Lifetime | None) -> Window:
    """It had pages at the decode worker, and a job at the prefill worker, but was not in the batch."""
    there = prefill.at.get(Instant.CANCELLED, reached)
    for instant, window in _JOB:
        if prefill.at.get(instant, there) >= there:
            return window
    sealed = decode.at.get(Instant.LAST_LAYER_LANDED, reached) < reached
    sealed = sealed or (store is not None and store.at.get(Instant.SEALED, reached) < reached)
    return Window.SEALED if sealed else Window.PUSHING


# The first of these that had not come when the job was cancelled says what it was doing.
_JOB = (
    (Instant.PREFILL_BEGUN, Window.PLACED),
    (Instant.LANDING_GRANTED, Window.RESERVING),
    (Instant.PREFIX_LOADED, Window.LOADING),
    (Instant.LAST_LAYER_COMPUTED, Window.PREFILLING),
)
