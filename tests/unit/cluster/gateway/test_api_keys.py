"""The file of keys, and the meters behind its limits."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from moonpool.cluster.gateway.tenants.book import Access, Book, Keys, parse, to_toml
from moonpool.cluster.gateway.tenants.caller import Caller
from moonpool.cluster.gateway.tenants.file import LOOK_S, FollowedKeys, edit_book, mint, read_book
from moonpool.cluster.gateway.tenants.gate import Gate
from moonpool.cluster.gateway.tenants.meters import Bucket
from moonpool.core.errors import ConfigError, Overloaded, RateLimited, Unauthorised

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HASH_KEY = bytes(range(32))


def book_of(*keys: dict[str, object], **tenants: dict[str, object]) -> tuple[Book, list[str]]:
    made, tokens = [], []
    for key in keys:
        kept, token = mint()
        made.append({**key, **kept})
        tokens.append(token)
    return Book.model_validate({"keys": made, "tenants": tenants}), tokens


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_known_by_its_secret_alone() -> None:
    book, (mine, other) = book_of({"name": "mine", "tenant": "acme"}, {"name": "other"})
    keys = Keys(book)
    assert keys.holder(f"Bearer {mine}", NOW).name == "mine"
    assert keys.holder(f"bearer  {other} ", NOW).name == "other"
    crossed = mine[: len("mp_") + 12] + other[len("mp_") + 12 :]
    for bad in (
        None,
        "",
        "Bearer",
        f"Basic {mine}",
        mine,
        f"Bearer {mine}x",
        f"Bearer {crossed}",
        "Bearer mp_" + "0" * 12 + "_",
    ):
        with pytest.raises(Unauthorised) as refused:
            keys.holder(bad, NOW)
        assert mine not in refused.value.message
        assert crossed not in refused.value.message


def test_an_expired_key_is_refused_by_name() -> None:
    book, (token,) = book_of({"name": "old", "expires": NOW})
    assert Keys(book).holder(f"Bearer {token}", NOW - timedelta(seconds=1)).name == "old"
    with pytest.raises(Unauthorised, match="'old' expired"):
        Keys(book).holder(f"Bearer {token}", NOW)


def test_a_book_reads_as_it_was_written() -> None:
    book, _ = book_of(
        {"name": "a", "tenant": "acme", "roles": ["user", "admin"], "expires": NOW, "priority": -3, "concurrent": 4},
        {"name": "b"},
        acme={"weight": 2.5, "region": "eu", "pool_bytes": 1 << 30, "tokens_per_minute": 7},
    )
    assert parse(to_toml(book), "book") == book


def test_no_secret_of_a_file_is_in_an_error_about_it() -> None:
    kept, _ = mint()
    text = f'[[keys]]\nname = "a"\nid = "{kept["id"]}"\nsalt = "{kept["salt"]}z"\nhash = "{kept["hash"]}"\n'
    with pytest.raises(ConfigError, match=r"keys\.0\.salt") as refused:
        parse(text, "book")
    assert kept["salt"] not in refused.value.message
    with pytest.raises(ConfigError, match="two keys"):
        parse(to_toml(Book()) + (text.replace("z", "") * 2), "book")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tenants": {"a b": {}}}, "up to 64 letters"),
        ({"tenants": {"a": {"region": "e u"}}}, r"tenants\.a\.region: must be up to 64 letters"),
        ({"tenants": {"a": {"weight": -1}}}, r"tenants\.a\.weight: must be greater than 0"),
    ],
)
def test_a_wrong_entry_is_told_in_words(tmp_path: Path, values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        edit_book(tmp_path / "keys.toml", lambda book: values)


@pytest.mark.parametrize("mode", [0o620, 0o604, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.toml"
    edit_book(path, lambda book: book.model_dump())
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        read_book(path)


def test_a_changed_file_is_followed_and_a_broken_one_leaves_things_as_they_are(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    kept, token = mint()
    edit_book(path, lambda book: {"keys": [{"name": "first", **kept}]})
    follow = FollowedKeys(path, clock)
    assert follow().holder(f"Bearer {token}", NOW).name == "first"
    path.write_text("[[keys")
    clock.now += LOOK_S
    assert follow().holder(f"Bearer {token}", NOW).name == "first"
    path.unlink()
    clock.now += LOOK_S
    assert follow().holder(f"Bearer {token}", NOW).name == "first"
    edit_book(path, lambda book: {"keys": []})
    clock.now += LOOK_S
    with pytest.raises(Unauthorised):
        follow().holder(f"Bearer {token}", NOW)


def test_a_file_that_is_gone_is_complained_of_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    edit_book(path, lambda book: {"keys": []})
    follow = FollowedKeys(path, clock)
    path.unlink()
    with capture_logs() as told:
        for _ in range(3):
            clock.now += LOOK_S
            follow()
    assert [line["event"] for line in told] == ["api keys not read again"]


def test_a_changed_file_that_was_open_to_others_is_read_once_its_mode_is_right(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", Clock()
    kept, token = mint()
    edit_book(path, lambda book: {"keys": [{"name": "revoked", **kept}]})
    follow = FollowedKeys(path, clock)
    path.write_text("")
    path.chmod(0o644)
    clock.now += LOOK_S
    assert follow().holder(f"Bearer {token}", NOW).name == "revoked"
    path.chmod(0o600)
    clock.now += LOOK_S
    with pytest.raises(Unauthorised):
        follow().holder(f"Bearer {token}", NOW)


def test_an_editor_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    edit_book(path, lambda book: {"tenants": {"acme": {"weight": 2.0}}})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="weight"):
        edit_book(path, lambda book: {"tenants": {"acme": {"weight": -1.0}}})
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [".keys.toml.lock", "keys.toml"]


@given(
    limit=st.floats(1.0, 1e6),
    steps=st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.0, 2.0)), min_size=1, max_size=40),
)
def test_what_a_bucket_gives_is_bounded_in_every_stretch_of_time(limit: float, steps: list[tuple[float, float]]) -> None:
    bucket, now, given_at = Bucket(0.0), 0.0, []
    for after, part in steps:
        now += after
        amount = part * limit
        if bucket.wait_s(amount, limit, now) == 0.0:
            bucket.take(amount, limit, now)
            given_at.append((now, amount))
        else:
            now += bucket.wait_s(amount, limit, now) + 1e-6
            assert bucket.wait_s(amount, limit, now) == pytest.approx(0.0, abs=1e-3)
    for i, (start, _) in enumerate(given_at):
        for end, last in given_at[i:]:
            total = sum(amount for at, amount in given_at if start <= at <= end)
            assert total - max(last - limit, 0.0) <= limit * (1.0 + (end - start) / 60.0) * (1 + 1e-9) + limit


def test_tokens_reserved_and_not_used_are_given_back() -> None:
    clock = Clock()
    book, (token,) = book_of({"name": "a", "tokens_per_minute": 1_000})
    gate = Gate(lambda: Keys(book), lambda: 1, clock)
    caller = gate.caller(f"Bearer {token}", Access.USER)
    first = gate.ticket(caller)
    first.begin()
    first.reserve(900)
    second = gate.ticket(caller)
    second.begin()
    with pytest.raises(RateLimited, match="tokens per minute") as refused:
        second.reserve(200)
    assert refused.value.retry_after_s == pytest.approx(6.0)
    first.end(100)
    first.end(100)
    second.reserve(200)
    assert second.headers()["x-ratelimit-remaining-tokens"] == "700"
    second.end(0)


def test_a_request_above_a_whole_minutes_worth_is_let_in_by_a_full_bucket() -> None:
    clock = Clock()
    book, (token,) = book_of({"name": "a", "tokens_per_minute": 100})
    gate = Gate(lambda: Keys(book), lambda: 1, clock)
    ticket = gate.ticket(gate.caller(f"Bearer {token}", Access.USER))
    ticket.begin()
    ticket.reserve(11)  # at a guess, before its prompt is read
    ticket.reserve(1_000)
    ticket.end(500)
    late = gate.ticket(ticket.caller)
    with pytest.raises(RateLimited) as refused:
        late.begin()
    assert refused.value.retry_after_s == pytest.approx(60.0 * 401 / 100)


def test_an_answer_longer_than_reserved_is_paid_for_later() -> None:
    clock = Clock()
    book, (token,) = book_of({"name": "a", "tokens_per_minute": 600})
    gate = Gate(lambda: Keys(book), lambda: 1, clock)
    caller = gate.caller(f"Bearer {token}", Access.USER)
    ticket = gate.ticket(caller)
    ticket.begin()
    ticket.reserve(600)
    ticket.end(1_200)
    late = gate.ticket(caller)
    with pytest.raises(RateLimited):
        late.begin()
    clock.now += 59.0
    with pytest.raises(RateLimited):
        gate.ticket(caller).begin()
    clock.now += 2.0
    gate.ticket(caller).begin()


def test_each_of_two_gateways_enforces_half_of_a_limit() -> None:
    clock, live = Clock(), [1]
    book, (token,) = book_of({"name": "a", "requests_per_minute": 10})
    gate = Gate(lambda: Keys(book), lambda: live[0], clock)
    caller = gate.caller(f"Bearer {token}", Access.USER)
    live[0] = 2
    for _ in range(5):
        gate.ticket(caller).begin()
    with pytest.raises(RateLimited, match="5 requests per minute"):
        gate.ticket(caller).begin()


def test_keys_of_a_tenant_share_its_limits_and_a_refusal_counts_nowhere() -> None:
    clock = Clock()
    book, tokens = book_of(
        {"name": "a", "tenant": "acme"},
        {"name": "b", "tenant": "acme", "concurrent": 1},
        acme={"requests_per_minute": 3},
    )
    gate = Gate(lambda: Keys(book), lambda: 1, clock)
    a, b = (gate.caller(f"Bearer {token}", Access.USER) for token in tokens)
    held = gate.ticket(b)
    held.begin()
    for _ in range(5):
        with pytest.raises(RateLimited, match="concurrent"):
            gate.ticket(b).begin()
    held.end(0)
    gate.ticket(a).begin()
    gate.ticket(b).begin()
    with pytest.raises(RateLimited, match="tenant 'acme'"):
        gate.ticket(a).begin()


def test_a_flood_of_one_tenant_leaves_places_for_the_others() -> None:
    book, _ = book_of({"name": "a", "tenant": "a"}, {"name": "b", "tenant": "b"})
    gate = Gate(lambda: Keys(book), lambda: 1)
    flood, quiet = Caller("a"), Caller("b")
    for _ in range(60):
        gate.take_places(flood, 1, 90)
    with pytest.raises(Overloaded, match="tenant 'a'"):
        gate.take_places(flood, 1, 90)
    for _ in range(10):
        gate.take_places(quiet, 1, 90)
    gate.leave_places(flood, 60)
    for _ in range(50):
        gate.take_places(quiet, 1, 90)


def test_prompts_of_one_request_take_no_more_places_than_as_many_requests() -> None:
    book, _ = book_of({"name": "a", "tenant": "a"}, {"name": "b", "tenant": "b"})
    gate = Gate(lambda: Keys(book), lambda: 1)
    flood, quiet = Caller("a"), Caller("b", weight=0.01)
    for n in (90, 61):
        with pytest.raises(Overloaded, match=f"would have {n} of 90"):
            gate.take_places(flood, n, 90)
    gate.take_places(flood, 60, 90)
    gate.take_places(quiet, 1, 90)
    with pytest.raises(Overloaded, match="tenant 'b'"):
        gate.take_places(quiet, 1, 90)


def test_a_tenant_alone_has_all_places() -> None:
    gate = Gate(None, lambda: 1)
    for _ in range(90):
        gate.take_places(Caller(), 1, 90)
    with pytest.raises(Overloaded):
        gate.take_places(Caller(), 1, 90)


def test_only_a_region_makes_salts_alike() -> None:
    salts = [
        Caller("a").salt(HASH_KEY),
        Caller("b").salt(HASH_KEY),
        Caller("a").salt(bytes(32)),
        Caller("a").salt(HASH_KEY, "mine"),
        Caller("c", region="a").salt(HASH_KEY),
        Caller("c", region="a").salt(HASH_KEY, "mine"),
        Caller("default", region="a").salt(HASH_KEY, "other"),
        Caller().salt(HASH_KEY),
        Caller().salt(HASH_KEY, "mine"),
    ]
    assert len(set(salts)) == len(salts)
    assert Caller("c", region="a").salt(HASH_KEY) == Caller("d", region="a").salt(HASH_KEY)
    assert Caller().salt(HASH_KEY) == b""
