"""Where a cancellation struck, by the instants of each process."""

from __future__ import annotations

import pytest

from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.windows import Window, window_of

AT = 10.0  # of the cancellation at the gateway; it reaches the others later
LATER = 99.0


def life(**at: float) -> Lifetime:
    return Lifetime({Instant(name): seconds for name, seconds in at.items()})


GATEWAY = life(arrived=0, placed=1, cancelled=AT)
DECODE = {"admitted": 1.1, "queued": 1.2, "cancelled": 10.1}
JOB = {"queued": 1.3, "prefill_begun": 2.0, "landing_granted": 3.0, "prefix_loaded": 4.0, "last_layer_computed": 5.0}


def job(until: str) -> Lifetime:
    """Its instants before ``until``."""
    names = list(JOB)
    return life(**{name: JOB[name] for name in names[: names.index(until)]}, cancelled=10.2)


def test_before_a_placement_it_is_queued() -> None:
    assert window_of(life(arrived=0, cancelled=AT), None, None, None) is Window.QUEUED


def test_what_is_not_cancelled_or_was_over_counts_nowhere() -> None:
    assert window_of(life(arrived=0, placed=1), life(**DECODE), None, None) is None
    assert window_of(GATEWAY, life(admitted=1.1, finished=9.0), None, None) is None


@pytest.mark.parametrize("decode", [None, life(admitted=1.1, cancelled=10.1), life(**DECODE)])
def test_a_placement_that_no_prefill_worker_heard_of_is_placed(decode: Lifetime | None) -> None:
    assert window_of(GATEWAY, decode, None, None) is Window.PLACED


@pytest.mark.parametrize(
    ("until", "window"),
    [
        ("prefill_begun", Window.PLACED),
        ("landing_granted", Window.RESERVING),
        ("prefix_loaded", Window.LOADING),
        ("last_layer_computed", Window.PREFILLING),
    ],
)
def test_the_first_instant_that_had_not_come_says_what_the_job_was_doing(until: str, window: Window) -> None:
    assert window_of(GATEWAY, life(**DECODE), job(until), None) is window


def test_an_instant_that_came_after_the_cancellation_does_not_count() -> None:
    late = life(**{**JOB, "last_layer_computed": LATER}, cancelled=10.2)
    assert window_of(GATEWAY, life(**DECODE), late, None) is Window.PREFILLING


@pytest.mark.parametrize(
    ("landed", "sealed", "window"),
    [(None, None, Window.PUSHING), (LATER, LATER, Window.PUSHING), (9.0, None, Window.SEALED), (None, 9.0, Window.SEALED)],
)
def test_after_its_computing_the_landing_decides(landed: float | None, sealed: float | None, window: Window) -> None:
    decode = life(**DECODE, **({} if landed is None else {"last_layer_landed": landed}))
    store = life(landing_granted=3.0, **({} if sealed is None else {"sealed": sealed}))
    assert window_of(GATEWAY, decode, life(**JOB, finished=6.0), store) is window


def test_in_the_batch_it_decodes() -> None:
    assert window_of(GATEWAY, life(**DECODE, runnable=9.0), life(**JOB, finished=6.0), life(sealed=8.0)) is Window.DECODING
