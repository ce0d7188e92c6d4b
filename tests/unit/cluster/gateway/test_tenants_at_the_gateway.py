"""Keys, roles, limits and salts over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from support.gateway_front import Front, eventually, front, says, silence

from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member

BODY = {"model": "tiny", "prompt": list(range(4, 54)), "max_tokens": 20}
KEYS: tuple[dict[str, object], ...] = (
    {"name": "alice", "tenant": "a"},
    {"name": "bob", "tenant": "b", "priority": 5},
    {"name": "eu-1", "tenant": "c"},
    {"name": "eu-2", "tenant": "d"},
    {"name": "slow", "tenant": "s", "requests_per_minute": 2},
    {"name": "short", "tenant": "s", "tokens_per_minute": 100},
    {"name": "ops", "tenant": "default", "roles": ["admin"]},
)
TENANTS = {"b": {"weight": 3.0}, "c": {"region": "eu"}, "d": {"region": "eu"}}


@dataclass
class Guarded:
    front: Front
    tokens: dict[str, str]
    file: Path

    def auth(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}"}

    async def ask(self, name: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        sent = {**BODY, **body}
        return await self.front.client.post("/v1/completions", json=sent, headers=self.auth(name) | (headers or {}))


@pytest.fixture
async def guarded(tiny_dir: Path, tmp_path: Path) -> AsyncIterator[Guarded]:
    tokens, entries = {}, []
    for key in KEYS:
        kept, token = mint()
        tokens[str(key["name"])] = token
        entries.append({**key, **kept})
    file = tmp_path / "keys.toml"
    edit_book(file, lambda book: {"keys": entries, "tenants": TENANTS})
    async with front(tiny_dir, config={"security": {"api_keys_file": str(file)}, "timing": {"queue_limit": 12}}) as one:
        one.decode.script = says(9)
        yield Guarded(one, tokens, file)


async def test_without_a_key_only_health_and_readiness_are_told(guarded: Guarded) -> None:
    client = guarded.front.client
    for path in ("/health", "/ready"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/admin/status"):
        answer = await client.get(path)
        assert answer.status_code == 401, path
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await client.post("/v1/completions", json=BODY)).status_code == 401
    assert not guarded.front.decode.jobs


async def test_each_role_has_its_routes(guarded: Guarded) -> None:
    client = guarded.front.client
    assert (await client.get("/v1/models", headers=guarded.auth("alice"))).status_code == 200
    refused = await client.get("/metrics", headers=guarded.auth("alice"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    for spelling in ("/metrics%0A", "/%6Detrics%0a", "/metrics/", "//metrics", "/v1/../metrics"):
        answer = await client.get(spelling, headers=guarded.auth("alice"))
        assert answer.status_code in (403, 404), spelling
    assert (await client.get("/metrics", headers=guarded.auth("ops"))).status_code == 200
    assert (await guarded.ask("ops")).status_code == 403


async def test_the_openai_client_meets_the_errors_it_knows(guarded: Guarded) -> None:
    def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{guarded.front.gateway.url}/v1", api_key=key, http_client=guarded.front.client, max_retries=0
        )

    with pytest.raises(openai.AuthenticationError):
        await client("mp_wrong").completions.create(model="tiny", prompt="x")
    good = client(guarded.tokens["slow"])
    for _ in range(2):
        await good.completions.create(model="tiny", prompt="x", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as limited:
        await good.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert limited.value.code == "rate_limit_exceeded"


async def test_a_limit_says_how_long_and_how_much_is_left(guarded: Guarded) -> None:
    answers = [await guarded.ask("slow", prompt="x", max_tokens=1) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
    assert answers[2].headers["x-ratelimit-limit-requests"] == "2"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["type"] == "rate_limit_error"


async def test_a_prompt_beyond_the_tokens_left_is_refused_before_it_is_tokenised(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await guarded.ask("short", prompt="word " * 10, max_tokens=1)
    assert answer.status_code == 200
    prompts = guarded.front.gateway._models.all[0].prompts

    async def never(*_: object) -> object:
        raise AssertionError("tokenised")

    monkeypatch.setattr(prompts, "of", never)
    giant = await guarded.ask("short", prompt="word " * 100_000, max_tokens=1)
    assert (giant.status_code, giant.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_what_was_reserved_and_not_generated_is_given_back(guarded: Guarded) -> None:
    for _ in range(3):  # one token of the 45 each may have
        answer = await guarded.ask("short", prompt=[4, 5], max_tokens=45)
        assert answer.status_code == 200
    assert int(answer.headers["x-ratelimit-limit-tokens"]) == 100


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_prompt_whose_client_gave_it_up_once_it_was_placed_is_paid_for(guarded: Guarded, leaves: bool) -> None:
    guarded.front.decode.script = silence
    asked = asyncio.create_task(guarded.ask("short", {} if leaves else {"x-deadline-ms": "300"}))
    await eventually(lambda: guarded.front.decode.jobs)
    if leaves:
        asked.cancel()
        await eventually(lambda: not guarded.front.gateway.numbers()["requests_in_flight"])
    else:
        assert (await asked).status_code == 504
    again = await guarded.ask("short")
    assert (again.status_code, again.headers["x-ratelimit-remaining-tokens"]) == (429, "50")


async def test_tenant_weight_priority_and_kind_go_along(guarded: Guarded) -> None:
    headers = {"x-moonpool-priority": "9", "x-moonpool-kind": "agent"}
    assert (await guarded.ask("bob", headers)).status_code == 200
    assert (await guarded.ask("alice", headers)).status_code == 200
    asked, told = guarded.front.conductor.placed, [job.attempt.request for job in guarded.front.decode.jobs]
    assert [(p.tenant, p.weight, p.priority, p.kind) for p in asked] == [("b", 3.0, 5, "agent"), ("a", 1.0, 0, "agent")]
    assert [(r.tenant, r.use.tenant, r.use.kind) for r in told] == [("b", "b", "agent"), ("a", "a", "agent")]
    for bad in ({"x-moonpool-priority": "high"}, {"x-moonpool-kind": "x" * 65}):
        assert (await guarded.ask("bob", bad)).json()["error"]["param"] == next(iter(bad))


async def test_equal_prompts_share_keys_within_a_region_only(guarded: Guarded) -> None:
    for name, salt in (("alice", None), ("bob", None), ("eu-1", None), ("eu-2", None), ("alice", "s"), ("alice", None)):
        assert (await guarded.ask(name, cache_salt=salt)).status_code == 200
    alice, bob, one, two, salted, again = (job.attempt.request for job in guarded.front.decode.jobs)
    assert alice.keys == again.keys
    assert one.keys == two.keys and one.namespace == two.namespace
    apart = [set(request.keys) for request in (alice, bob, one, salted)]
    assert len(set.union(*apart)) == sum(len(keys) for keys in apart)


async def test_a_revoked_key_is_unknown_and_a_new_one_known_without_a_restart(guarded: Guarded) -> None:
    kept, token = mint()

    def change(book: object) -> dict[str, object]:
        return {"keys": [{"name": "new", "tenant": "n", **kept}]}

    edit_book(guarded.file, change)
    guarded.tokens["new"] = token
    async with asyncio.timeout(10):
        while (await guarded.ask("new")).status_code == 401:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await guarded.ask("alice")).status_code == 401


async def test_one_tenants_flood_leaves_places_in_flight_for_another(guarded: Guarded) -> None:
    guarded.front.decode.script = silence
    flood = [asyncio.create_task(guarded.ask("alice")) for _ in range(20)]
    await eventually(lambda: sum(task.done() for task in flood) == 12)
    assert {task.result().status_code for task in flood if task.done()} == {429}
    quiet = asyncio.create_task(guarded.ask("bob"))
    await eventually(lambda: any(job.attempt.request.tenant == "b" for job in guarded.front.decode.jobs))
    for task in (*flood, quiet):
        task.cancel()
    await asyncio.gather(*flood, quiet, return_exceptions=True)


async def test_what_tenants_took_is_counted_by_names_of_the_file(guarded: Guarded) -> None:
    await guarded.ask("alice")
    await guarded.front.client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer mp_stranger"})
    text = (await guarded.front.client.get("/metrics", headers=guarded.auth("ops"))).text
    assert 'moonpool_gateway_tenant_requests_total{outcome="ok",tenant="a"} 1.0' in text
    assert 'moonpool_gateway_tenant_tokens_total{kind="prompt",tenant="a"} 50.0' in text
    assert "stranger" not in text


async def test_two_gateways_each_enforce_half(guarded: Guarded) -> None:
    for i in range(2):
        guarded.front.membership.say(
            Member(MemberId(f"gateway-{i}"), Role.GATEWAY, NodeId("b"), Incarnation(1), f"127.0.0.1:{i + 1}", 0)
        )
    assert [(await guarded.ask("slow", prompt="x", max_tokens=1)).status_code for _ in range(2)] == [200, 429]
