from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.gateway.ledger import DISTRUST_S, LAST_PAUSE_S, Ledger
from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import (
    Busy,
    DeadlinePassed,
    Failure,
    InvalidRequest,
    MoonpoolError,
    Moved,
    NoPath,
    Overloaded,
    PeerSilent,
    Reason,
    TransferFailed,
)
from moonpool.core.ids import Incarnation, MemberId, RequestId
from moonpool.core.request import Emission, FinishReason, Request, Sampled, SamplingParams, Targets

LIVES: dict[str, int] = {}


def ledger(
    *,
    attempts: int = 3,
    lives: dict[str, int] | None = None,
    targets: Targets | None = None,
    hasher: BlockHasher | None = None,
    path_wait_ms: int = 0,
) -> Ledger:
    keys = tuple(hasher.keys((1, 2, 3))) if hasher else ()
    request = Request(
        RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=10), bytes(16), keys, targets=targets or Targets(ttft_ms=50)
    )
    known = LIVES if lives is None else lives
    return Ledger(
        request,
        started=100.0,
        budget_ms=5_000,
        max_attempts=attempts,
        life_of=lambda m: Incarnation(known[m]) if m in known else None,
        hasher=hasher,
        path_wait_ms=path_wait_ms,
    )


def emission(position: int, *, attempt: int = 1, finish: FinishReason | None = None, cached: int = 0) -> Emission:
    return Emission(RequestId("r"), attempt, position, Sampled(50 + position), finish, cached)


def test_ids_are_taken_in_order_and_once() -> None:
    book = ledger()
    book.next_attempt(100.0)
    assert book.accept(emission(0, cached=2))
    assert not book.accept(emission(0))
    assert book.accept(emission(1, finish=FinishReason.LENGTH))
    assert not book.accept(emission(2))
    assert (book.emitted, book.cached_tokens, book.finish) == ([50, 51], 2, FinishReason.LENGTH)


def test_an_emission_of_an_earlier_attempt_is_ignored() -> None:
    book = ledger()
    book.next_attempt(100.0)
    book.accept(emission(0))
    book.failed(PeerSilent("gone", peer="decode-0"))
    book.next_attempt(100.1)
    assert not book.accept(emission(1, attempt=1))
    assert book.accept(emission(1, attempt=2))
    assert book.attempt(101.0).emitted == (50, 51)


def test_a_missing_id_ends_the_attempt_not_the_request() -> None:
    book = ledger()
    book.next_attempt(100.0)
    with pytest.raises(TransferFailed, match="missing"):
        book.accept(emission(1))


def test_the_next_attempt_excludes_the_failed_peer_and_carries_no_targets() -> None:
    book = ledger(lives={"prefill-0": 7})
    book.next_attempt(100.0)
    assert book.place_request().targets == Targets(ttft_ms=50)
    book.failed(PeerSilent("gone", peer="prefill-0"))
    book.next_attempt(100.0)
    asked = book.place_request()
    assert (asked.attempt, asked.exclude, asked.targets) == (2, (MemberId("prefill-0"),), Targets())


def test_a_peer_that_came_back_as_a_newer_process_may_serve_again() -> None:
    lives = {"decode-0": 7}
    book = ledger(lives=lives)
    book.next_attempt(100.0)
    book.failed(PeerSilent("gone", peer="decode-0"))
    lives["decode-0"] = 8
    book.next_attempt(100.0)
    assert book.place_request().exclude == ()


def test_the_last_failure_is_the_answer_when_attempts_run_out() -> None:
    book = ledger(attempts=2)
    for name in ("one", "two"):
        book.next_attempt(100.0)
        book.failed(TransferFailed(name))
    with pytest.raises(TransferFailed, match="two"):
        book.next_attempt(100.0)


def test_an_error_no_attempt_can_mend_ends_the_request() -> None:
    book = ledger()
    book.next_attempt(100.0)
    with pytest.raises(InvalidRequest):
        book.failed(InvalidRequest("bad"))


def test_the_budget_bounds_all_attempts_together() -> None:
    book = ledger()
    book.next_attempt(104.9)
    assert book.left_ms(104.9) == 100
    book.failed(PeerSilent("gone"))
    with pytest.raises(DeadlinePassed, match=r"5000 ms.*gone"):
        book.next_attempt(105.0)


def test_a_busy_peer_is_asked_again_when_nobody_else_is_left() -> None:
    book = ledger()
    book.next_attempt(100.0)
    book.failed(Busy("full", peer="decode-0"))
    book.next_attempt(100.0)
    assert book.place_request().exclude == ("decode-0",)
    book.no_path(NoPath("nobody", retry_after_s=1))
    book.next_attempt(100.0)
    assert book.place_request().exclude == ()


def test_without_anybody_left_the_failure_that_led_there_is_the_answer() -> None:
    book = ledger()
    book.next_attempt(100.0)
    book.failed(PeerSilent("killed", peer="decode-0"))
    book.next_attempt(100.0)
    with pytest.raises(PeerSilent, match="killed"):
        book.no_path(NoPath("nobody", retry_after_s=1))


def test_a_decode_worker_that_ends_an_attempt_on_its_own_is_left() -> None:
    book = ledger()
    book.next_attempt(100.0)
    with pytest.raises(PeerSilent):
        book.accept(emission(0, finish=FinishReason.CANCELLED))


def test_cached_tokens_never_cover_the_whole_prompt() -> None:
    book = ledger()
    book.next_attempt(100.0)
    book.accept(emission(0, cached=3))
    assert book.cached_tokens == 2


@pytest.mark.parametrize("emitted", [0, 1, 4, 5, 6, 9])
def test_the_next_attempt_asks_for_the_blocks_of_prompt_and_output(emitted: int) -> None:
    hasher = BlockHasher(bytes(32), bytes(16), 2)
    book = ledger(hasher=hasher)
    book.next_attempt(100.0)
    assert book.place_request().keys == book.request.keys
    for position in range(emitted):
        book.accept(emission(position))
    book.failed(PeerSilent("gone", peer="decode-0"))
    book.next_attempt(100.0)
    asked = book.place_request()
    context = [1, 2, 3, *range(50, 50 + emitted)]
    assert asked.keys == tuple(hasher.keys(context))
    assert (len(asked.keys), asked.prompt_tokens, asked.max_tokens) == (len(context) // 2, len(context), 10 - emitted)
    assert book.attempt(100.0).context == tuple(context)


def test_cached_tokens_stay_those_of_the_attempt_that_answered_first() -> None:
    book = ledger()
    book.next_attempt(100.0)
    book.accept(emission(0, cached=1))
    book.failed(PeerSilent("gone"))
    book.next_attempt(100.0)
    book.accept(emission(1, attempt=2, cached=3))
    assert book.cached_tokens == 1


def test_the_first_failure_is_followed_at_once_and_later_ones_after_growing_jittered_pauses() -> None:
    book = ledger(attempts=30)
    bounds = []
    for _ in range(8):
        book.next_attempt(100.0)
        book.failed(PeerSilent("gone"))
        least, most = book.pause_s(0.0), book.pause_s(1.0)
        assert least == most / 2
        bounds.append(most)
    assert bounds[0] == 0
    assert bounds[1:] == sorted(bounds[1:])
    assert bounds[-1] == LAST_PAUSE_S
    book.next_attempt(100.0)
    book.accept(emission(0, attempt=book.number))
    book.failed(PeerSilent("gone"))
    assert book.pause_s(1.0) == 0, "an id was streamed: the next failure is a first one again"


def test_a_request_under_way_waits_for_a_worker_and_no_attempt_counts_meanwhile() -> None:
    book, now = ledger(path_wait_ms=3_000), 100.0
    book.next_attempt(now)
    book.accept(emission(0))
    book.failed(PeerSilent("killed", peer="decode-0"))
    for _ in range(5):
        now += 0.4
        book.next_attempt(now)
        book.no_path(NoPath("nobody", retry_after_s=1))
        assert 0 < book.pause_s(0.5) <= LAST_PAUSE_S
    now += 0.4
    book.next_attempt(now)
    book.accept(emission(1, attempt=book.number))
    assert book.emitted == [50, 51]


@pytest.mark.parametrize("refusal", [NoPath("nobody", retry_after_s=1), Overloaded("full", retry_after_s=1)])
def test_after_its_patience_the_failure_that_led_there_is_the_answer(refusal: NoPath | Overloaded) -> None:
    book, now = ledger(path_wait_ms=1_000), 100.0
    book.next_attempt(now)
    book.failed(PeerSilent("killed", peer="decode-0"))
    for _ in range(4):
        now += 0.25
        book.next_attempt(now)
        book.no_path(refusal)
    book.next_attempt(now + 0.25)
    with pytest.raises(PeerSilent, match="killed"):
        book.no_path(refusal)


def test_its_patience_begins_anew_after_somebody_took_it() -> None:
    book, now = ledger(path_wait_ms=1_000), 100.0
    book.next_attempt(now)
    book.failed(PeerSilent("killed", peer="decode-0"))
    book.next_attempt(now + 0.1)
    book.no_path(NoPath("nobody", retry_after_s=1))
    book.next_attempt(now + 0.2)
    book.failed(PeerSilent("killed while it computed", peer="decode-1"))
    book.next_attempt(now + 3.0)
    book.no_path(NoPath("nobody", retry_after_s=1))
    book.next_attempt(now + 4.1)
    with pytest.raises(PeerSilent, match="killed while"):
        book.no_path(NoPath("nobody", retry_after_s=1))


def test_a_request_that_nobody_has_begun_to_answer_is_refused_at_once() -> None:
    book = ledger(path_wait_ms=10_000)
    book.next_attempt(100.0)
    with pytest.raises(NoPath):
        book.no_path(NoPath("nobody", retry_after_s=1))


def test_busy_workers_are_waited_for_by_a_request_under_way_and_counted_for_a_new_one() -> None:
    book, now = ledger(path_wait_ms=3_000), 100.0
    book.next_attempt(now)
    book.accept(emission(0))
    for _ in range(6):
        book.failed(Busy("full", peer="decode-0"))
        now += 0.1
        book.next_attempt(now)
    fresh = ledger(path_wait_ms=3_000)
    for _ in range(3):
        fresh.next_attempt(100.0)
        fresh.failed(Busy("full", peer="decode-0"))
    with pytest.raises(Busy):
        fresh.next_attempt(100.0)


def test_the_only_worker_there_is_gets_another_chance_once_membership_would_know_it_dead() -> None:
    book, now = ledger(lives={"decode-0": 7}, path_wait_ms=10_000), 100.0
    book.next_attempt(now)
    book.failed(TransferFailed("slice lost", peer="decode-0"))
    for step in (0.0, DISTRUST_S / 2):
        book.next_attempt(now + step)
        assert book.place_request().exclude == ("decode-0",)
        book.no_path(NoPath("nobody", retry_after_s=1))
    book.next_attempt(now + DISTRUST_S)
    book.no_path(NoPath("nobody", retry_after_s=1))
    book.next_attempt(now + DISTRUST_S + 0.1)
    assert book.place_request().exclude == ()


def test_being_handed_over_by_a_leaving_worker_is_no_failure() -> None:
    book = ledger(attempts=1)
    for _ in range(5):
        book.next_attempt(100.0)
        book.failed(Moved("leaving", peer="decode-0"))
    book.next_attempt(100.0)
    assert book.under_way


events = st.lists(
    st.one_of(
        st.tuples(st.just("emit"), st.integers(1, 4), st.integers(0, 6)),
        st.tuples(st.just("fail"), st.sampled_from([Reason.BUSY, Reason.PEER_SILENT, Reason.DIGEST_MISMATCH]), st.just(0)),
    ),
    max_size=30,
)


@given(script=events)
def test_ids_streamed_are_never_repeated_lost_or_taken_back(script: list[tuple[str, int | Reason, int]]) -> None:
    """Whatever arrives: emitted ids are those of positions 0, 1, 2, ... and at most three attempts are minted."""
    book = ledger()
    book.next_attempt(100.0)
    streamed: list[int] = []
    try:
        for kind, value, position in script:
            if kind == "emit" and isinstance(value, int):
                try:
                    if book.accept(emission(position, attempt=value)):
                        assert (value, position) == (book.number, len(streamed))
                        streamed.append(50 + position)
                except TransferFailed as e:
                    assert position > len(streamed)
                    book.failed(e)
                    book.next_attempt(100.0)
            elif isinstance(value, Reason):
                book.failed(Failure(value, "x", "p").to_exception())
                book.next_attempt(100.0)
            assert book.emitted == streamed
    except MoonpoolError:
        assert book.number == 3
    assert book.number <= 3
