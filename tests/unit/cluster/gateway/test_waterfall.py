"""One request's instants of several processes on the clock of its gateway."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.gateway.console.waterfall import Part, waterfall
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime

# What really happened, on one clock.
GATEWAY = {"arrived": 0.0, "tokenised": 0.001, "placed": 0.003, "admitted": 0.004, "first_token": 0.100, "finished": 0.500}
DECODE = {
    "admitted": 0.005,
    "queued": 0.006,
    "last_layer_landed": 0.098,
    "first_token": 0.099,
    "runnable": 0.101,
    "finished": 0.499,
}
PREFILL = {
    "queued": 0.007,
    "prefill_begun": 0.010,
    "landing_granted": 0.012,
    "prefix_loaded": 0.020,
    "last_layer_computed": 0.090,
    "first_token": 0.095,
    "finished": 0.099,
}
STORE = {"landing_granted": 0.011, "sealed": 0.098, "finished": 0.102}


def part(role: Role, host: str, at: dict[str, float], ahead: float = 0.0, attempt: int = 1) -> Part:
    life = Lifetime({Instant(name): 100.0 + when + ahead for name, when in at.items()})
    return Part(f"{role.value}-0", role, "a", host, 0 if role is Role.GATEWAY else attempt, life)


def begins(told: dict[str, Any], member: str) -> dict[str, float]:
    (row,) = [row for row in told["rows"] if row["member"] == member]
    return {step["name"]: step["begin_ms"] for step in row["steps"]}


def test_on_one_host_the_instants_are_told_as_they_are() -> None:
    others = [part(Role.STORE, "h", STORE), part(Role.PREFILL, "h", PREFILL), part(Role.DECODE, "h", DECODE)]
    told = waterfall(part(Role.GATEWAY, "h", GATEWAY), others)
    assert [row["member"] for row in told["rows"]] == ["gateway-0", "decode-0", "prefill-0", "store-0"]
    assert begins(told, "gateway-0") == {"tokenise": 0.0, "place": 1.0, "open": 3.0, "first_token": 4.0, "stream": 100.0}
    assert begins(told, "prefill-0")["compute"] == 20.0
    assert begins(told, "store-0") == {"land": 11.0, "hold": 98.0}
    assert (told["ms"], any(row["moved"] for row in told["rows"])) == (500.0, False)


@given(*(st.floats(-1e6, 1e6) for _ in range(3)))
def test_clocks_of_other_hosts_are_laid_to_within_a_messages_time(decode: float, prefill: float, store: float) -> None:
    others = [
        part(Role.DECODE, "d", DECODE, decode),
        part(Role.PREFILL, "p", PREFILL, prefill),
        part(Role.STORE, "s", STORE, store),
    ]
    told = waterfall(part(Role.GATEWAY, "g", GATEWAY), others)
    for member, truth in (("decode-0", DECODE), ("prefill-0", PREFILL), ("store-0", STORE)):
        (row,) = [row for row in told["rows"] if row["member"] == member]
        assert row["moved"]
        for instant in row["instants"]:
            assert abs(instant["at_ms"] - 1e3 * truth[instant["name"]]) < 8.0, (member, instant)


def test_processes_of_one_host_are_moved_together() -> None:
    others = [part(Role.DECODE, "d", DECODE, 77.0), part(Role.STORE, "d", STORE, 77.0)]
    told = waterfall(part(Role.GATEWAY, "g", GATEWAY), others)
    decode, store = begins(told, "decode-0"), begins(told, "store-0")
    assert round(store["land"] - decode["first_token"], 3) == 5.0


def test_a_later_attempt_on_an_unknown_host_begins_with_its_try() -> None:
    gateway = part(Role.GATEWAY, "g", GATEWAY)
    gateway.life.begin_try(1, 100.003).ended = 100.2
    gateway.life.begin_try(2, 100.25).facts["outcome"] = "ok"
    second = part(Role.DECODE, "d", DECODE, 9_000.0, attempt=2)
    told = waterfall(gateway, [second])
    assert min(begins(told, "decode-0").values()) == 250.0
    assert [(one["attempt"], one["begin_ms"], one["end_ms"]) for one in told["tries"]] == [(1, 3.0, 200.0), (2, 250.0, None)]


def test_what_is_under_way_has_a_last_step_that_is_open() -> None:
    at = {name: when for name, when in GATEWAY.items() if name not in ("first_token", "finished")}
    told = waterfall(part(Role.GATEWAY, "g", at), [], now=100.050)
    (row,) = told["rows"]
    assert row["steps"][-1] | {"text": ""} == {
        "name": "first_token",
        "number": 8,
        "text": "",
        "begin_ms": 4.0,
        "end_ms": 50.0,
        "open": True,
    }
