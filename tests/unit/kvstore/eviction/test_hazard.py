from __future__ import annotations

import numpy as np
import pytest

from moonpool.core.use import Use
from moonpool.kvstore.eviction.hazard import KINDS, Hazard
from moonpool.kvstore.eviction.reuse import ReuseHazard

CHAT, ONCE = Use("a", "chat", 1, 4_000), Use("a", "once", 1, 4_000)


def taught() -> Hazard:
    """Chats came back after 30 s, one block longer; single requests never did. Rows 0 to 799 are used up."""
    policy = Hazard()
    for at in range(100):
        now, rows = at * 3.0, [8 * at + i for i in range(8)]
        policy.named(rows, [row.to_bytes(16, "little") for row in rows])
        policy.stored(rows[:2], 0, CHAT, now)
        policy.stored(rows[2:4], 0, ONCE, now)
        if at >= 10:
            old = 8 * (at - 10)
            policy.used([old, old + 1], 0, Use("a", "chat", 2, 4_400), now)
            policy.stored(rows[4:5], 2, Use("a", "chat", 2, 4_400), now)
    policy.choose(1, 300.0)
    return policy


def test_what_comes_back_outlives_what_does_not_though_it_is_older() -> None:
    policy = taught()
    policy.stored([800], 0, CHAT, 301.0)
    policy.stored([801], 0, ONCE, 304.0)
    policy.offer([800, 801])
    assert policy.choose(2, 305.0) == [801, 800]


def test_what_a_conversation_left_behind_goes_first() -> None:
    policy = taught()
    policy.stored([800], 0, CHAT, 301.0)
    policy.stored([801], 0, CHAT, 302.0)
    policy.stored([802, 803], 0, CHAT, 303.0)
    policy.offer([800, 801, 803])
    policy.used([802], 0, Use("a", "chat", 2, 4_400), 306.0)
    policy.stored([804], 1, Use("a", "chat", 2, 4_400), 306.0)
    policy.offer([804])
    assert policy.choose(1, 306.0) == [803]


@pytest.mark.parametrize("learned", [False, True])
def test_what_another_node_took_over_goes_first_until_it_is_used_again(learned: bool) -> None:
    policy = taught() if learned else Hazard()
    policy.stored([800, 801], 0, CHAT, 301.0)
    policy.stored([802], 0, ONCE, 302.0)
    policy.stored([803, 804], 0, CHAT, 303.0)
    policy.offer([801, 802, 804])
    policy.cool([803, 804], 304.0)
    policy.cool([800, 801], 304.5)
    assert policy.choose(1, 305.0) == [804]
    policy.used([800, 801], 0, CHAT, 305.0)
    policy.removed([804])
    policy.offer([803])
    policy.used([803], 0, CHAT, 305.5)
    assert policy.choose(1, 306.0) == [802]


def test_a_return_to_cooled_blocks_is_the_return_of_the_request_they_belonged_to() -> None:
    policy = Hazard()
    policy.stored([0, 1], 0, CHAT, 0.0)
    policy.cool([0, 1], 1.0)
    policy.used([0, 1], 0, CHAT, 1.5)
    assert policy._running.returns == 0, "the same request, told twice"
    policy.cool([0, 1], 2.0)
    policy.used([0, 1], 0, Use("a", "chat", 2, 5_000), 40.0)
    assert policy._running.returns == 1


def test_what_many_conversations_share_is_not_cooled() -> None:
    policy = Hazard()
    policy.stored([0, 1], 0, CHAT, 0.0)
    for branch in range(30):
        policy.used([0], 0, ONCE, 3.0 * branch + 3.0)
        policy.stored([10 + branch], 1, ONCE, 3.0 * branch + 3.0)
    policy.stored([50], 0, ONCE, 50.0)
    policy.offer([0, 1, 50])
    policy.cool([0, 1], 91.0)
    assert policy.choose(1, 91.0) == [1]
    assert policy.choose(1, 91.0) == [50]


def test_before_anything_was_learned_the_least_recent_request_goes_first_and_the_deepest_of_its_blocks() -> None:
    policy = Hazard()
    policy.stored([0, 1], 0, CHAT, 0.0)
    policy.stored([2, 3], 0, ONCE, 5.0)
    policy.offer([1, 3])
    assert policy.choose(1, 6.0) == [1]
    policy.removed([1])
    policy.offer([0])
    policy.used([0], 0, Use("a", "chat", 2, 5_000), 7.0)
    assert policy.choose(2, 8.0) == [3, 0]


def test_a_return_to_evicted_blocks_is_learned_from_too() -> None:
    policy = Hazard()
    policy.named([0, 1], [b"k0", b"k1"])
    policy.stored([0, 1], 0, CHAT, 0.0)
    policy.offer([1])
    assert policy.choose(1, 1.0) == [1]
    policy.removed([1])
    policy.offer([0])
    assert policy.choose(1, 1.0) == [0]
    policy.removed([0])
    policy.named([5, 6, 7], [b"k0", b"k1", b"k2"])
    policy.stored([5, 6, 7], 0, Use("a", "chat", 2, 5_000), 40.0)
    assert policy._running.returns == 1


def test_one_request_told_in_several_calls_is_no_return() -> None:
    policy = Hazard()
    policy.stored([0, 1], 0, CHAT, 0.0)
    policy.stored([2, 3], 2, CHAT, 0.5)
    policy.used([0, 1, 2, 3], 0, CHAT, 0.9)
    assert policy._running.returns == 0


def test_hazards_are_found_again_from_what_they_produced() -> None:
    """Two kinds: half of the first returns at 100 s, none of the second; both are seen to 1,000 s."""
    model = ReuseHazard([3])
    for i in range(400):
        number = model.begin([1 + i % 2], 0.0)
        if i % 4 == 0:
            model.followed(number, 100.0)
    assert model.fit(1_000.0)
    first, second = model.index([1]), model.index([2])
    assert first[0] == pytest.approx(0.5 / 100, rel=0.4)
    assert second[0] < first[0] / 10
    assert first[15] < first[0] / 10
    assert np.all(first >= 0)


def test_too_few_returns_teach_nothing() -> None:
    model = ReuseHazard([2])
    for _ in range(100):
        model.begin([1], 0.0)
    assert not model.fit(50.0)


def test_the_length_of_an_answer_tells_requests_of_one_use_apart() -> None:
    """Every second prompt gets a long answer, and only those come back; they differ in length, so that an end finds its own."""
    policy = Hazard()
    for at in range(120):
        now, use = at * 3.0, Use("a", "chat", 1, 3_000 + at)
        policy.stored([2 * at, 2 * at + 1], 0, use, now)
        policy.ended(use, 900 if at % 2 else 20, now + 2.0)
        if at > 11 and at % 2:
            policy.used([2 * at - 20, 2 * at - 19], 0, Use("a", "chat", 2, 3_100 + at), now)
    policy.choose(1, 400.0)
    for row, tokens in ((500, 900), (501, 20)):
        use = Use("a", "chat", 1, 3_000 + row)
        policy.stored([row], 0, use, 401.0 + row - 500)
        policy.ended(use, tokens, 404.0)
    policy.offer([500, 501])
    assert policy.choose(1, 405.0) == [501]


def test_after_a_change_of_traffic_the_short_memory_is_believed() -> None:
    """For 5,000 requests the first kind comes back after 20 s and the second never does; then it is the other way round."""
    model, fit_at = ReuseHazard([3]), 300.0
    for i in range(7_000):
        now = float(i)
        model.begin([1 + i % 2], now)
        if i >= 20 and i % 2 == (0 if i < 5_000 else 1):
            model.followed(i - 20, now)
        if now >= fit_at:
            fit_at += 300.0
            model.fit(now)
        if i == 4_900:
            assert model.index([1])[0] > 5 * model.index([2])[0]
    assert model.index([2])[0] > 5 * model.index([1])[0]


def test_clients_that_name_ever_new_kinds_take_no_memory_and_the_first_ones_stay_apart() -> None:
    policy = Hazard()
    kinds = {name: policy._kind(Use("a", name)) for name in map(str, range(10 * KINDS))}
    assert len(policy._kinds) < KINDS
    assert len(set(kinds.values())) == KINDS - 1
    assert all(0 < kind < KINDS for kind in kinds.values())
    assert [policy._kind(Use("a", str(n))) for n in range(5)] == [kinds[str(n)] for n in range(5)]
