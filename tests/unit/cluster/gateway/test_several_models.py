"""Several models behind one gateway: names, aliases, readiness, and what a caller may use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateway_front import Front, eventually, front, says, silence

from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.core.errors import ConfigError

BODY: dict[str, Any] = {"prompt": "once", "max_tokens": 4}


def two(tiny_dir: Path, **gateway: object) -> dict[str, dict[str, object]]:
    """The first model is called tiny, the second one other."""
    other = {"name": "other", "path": str(tiny_dir), "aliases": ["gpt-4o-mini", "best"], "ttft_target_ms": 900}
    return {"model": {"aliases": ["small"]}, "gateway": {"models": [other], **gateway}}


@pytest.fixture
async def both(tiny_dir: Path) -> AsyncIterator[Front]:
    async with front(tiny_dir, config=two(tiny_dir)) as running:
        running.decode.script = says(9)
        yield running


@pytest.fixture
async def half(tiny_dir: Path) -> AsyncIterator[Front]:
    """Everybody there is serves the first model."""
    async with front(tiny_dir, config=two(tiny_dir), group="tiny") as running:
        running.decode.script = says(9)
        yield running


async def ask(front: Front, model: str, **extra: Any) -> httpx.Response:
    return await front.client.post("/v1/completions", json={**BODY, "model": model, **extra})


async def test_the_body_says_which_model_by_name_or_alias_and_the_answer_says_its_name(both: Front) -> None:
    for asked, name in (("tiny", "tiny"), ("small", "tiny"), ("other", "other"), ("gpt-4o-mini", "other"), ("best", "other")):
        answer = await ask(both, asked)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
    refused = await ask(both, "gpt-4")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-4' is not served here; use 'tiny', 'other'" in error["message"]


async def test_models_are_listed_by_every_name_with_what_each_stands_for(both: Front) -> None:
    client = openai.AsyncOpenAI(base_url=f"{both.gateway.url}/v1", api_key="none", http_client=both.client)
    listed = [(m.id, m.root) async for m in await client.models.list()]  # type: ignore[attr-defined]
    assert listed == [("tiny", "tiny"), ("other", "other"), ("small", "tiny"), ("gpt-4o-mini", "other"), ("best", "other")]
    one = (await both.client.get("/v1/models/best")).json()
    assert (one["id"], one["root"], one["max_model_len"]) == ("best", "other", 256)


async def test_a_model_without_a_path_is_503_while_the_other_one_answers(half: Front) -> None:
    assert (await ask(half, "tiny")).status_code == 200
    refused = await ask(half, "other")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    error = refused.json()["error"]
    assert error["code"] == "no_path"
    assert error["missing"] == ["conductor", "prefill", "decode"]
    assert "'other'" in error["message"]
    assert half.gateway.numbers()["models_without_path"] == 1
    assert half.gateway.words()["models_without_path"] == "other"


async def test_a_model_whose_requests_wait_takes_no_places_of_the_other_ones(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={**two(tiny_dir), "timing": {"queue_limit": 1}}) as running:
        running.decode.script = silence
        waiting = asyncio.create_task(ask(running, "tiny"))
        await eventually(lambda: running.decode.jobs)
        running.decode.script = says(9)
        assert (await ask(running, "tiny")).status_code == 429
        assert (await ask(running, "other")).status_code == 200
        waiting.cancel()


async def test_ready_means_any_model_unless_one_or_all_are_asked_for(half: Front) -> None:
    async def ready(query: str = "") -> tuple[int, dict[str, Any]]:
        answer = await half.client.get(f"/ready{query}")
        return answer.status_code, answer.json()

    assert await ready() == (200, {"status": "ready", "models": 2, "models_ready": 1})
    assert (await ready("?model=tiny"))[0] == 200
    code, told = await ready("?model=other")
    assert (code, told["missing"]) == (503, ["conductor", "prefill", "decode"])
    assert (await ready("?model=*"))[0] == 503
    code, told = await ready("?model=nobody")
    assert code == 404 and "other" not in told["error"]["message"], "the route is open to everybody"
    assert half.gateway.missing() == []


async def test_a_models_own_target_comes_before_the_gateways_and_after_the_requests(both: Front) -> None:
    async def ttft(model: str, headers: dict[str, str] | None = None, **extra: Any) -> float | None:
        await both.client.post("/v1/completions", json={**BODY, "model": model, **extra}, headers=headers)
        return both.conductor.placed[-1].targets.ttft_ms

    assert await ttft("tiny") is None
    assert await ttft("best") == 900
    assert await ttft("best", slo={"ttft_ms": 500}) == 500
    assert await ttft("best", slo={"ttft_ms": 0}) is None
    assert await ttft("best", {"x-ttft-target-ms": "300"}, slo={"ttft_ms": 500}) == 300
    refused = await ask(both, "best", slo={"tbt_ms": 1e-9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo.tbt_ms")


async def test_hints_and_priority_in_the_body_reach_who_heeds_them_and_share_no_kv(both: Front) -> None:
    async def sent(**extra: Any) -> Any:
        await ask(both, "tiny", **extra)
        return both.decode.jobs[-1].attempt.request

    plain = await sent()
    keyed, again, other = (
        await sent(prompt_cache_key="app"),
        await sent(prompt_cache_key="app"),
        await sent(prompt_cache_key="b"),
    )
    assert plain.kind == "" and keyed.kind == again.kind not in ("", other.kind)
    kept = await sent(prompt_cache_key="app", prompt_cache_retention="24h")
    assert kept.kind not in ("", keyed.kind)
    assert len({one.namespace for one in (plain, keyed, other, kept)}) == 1
    assert (await sent(priority=-3)).priority == 3, "vLLM's smallest goes first"
    refused = await ask(both, "tiny", prompt_cache_retention="1h")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_cache_retention")


async def test_a_tenant_that_may_use_one_model_is_told_of_no_other(tiny_dir: Path, tmp_path: Path) -> None:
    kept, token = mint()
    file = tmp_path / "keys.toml"
    tenants = {"t": {"models": ["other"], "tbt_target_ms": 70.0}}
    edit_book(file, lambda book: {"keys": [{"name": "k", "tenant": "t", **kept}], "tenants": tenants})
    config = {**two(tiny_dir), "security": {"api_keys_file": str(file)}}
    async with front(tiny_dir, config=config) as running:
        running.decode.script = says(9)
        running.client.headers["authorization"] = f"Bearer {token}"
        assert (await ask(running, "best")).status_code == 200
        assert running.conductor.placed[-1].targets.tbt_ms == 70
        refused = await ask(running, "tiny")
        assert refused.status_code == 404 and "use 'other'" in refused.json()["error"]["message"]
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["other", "gpt-4o-mini", "best"]


def test_a_name_that_no_model_has_is_refused_in_the_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenants\.t\.models\.0: must be the name of a model"):
        edit_book(tmp_path / "keys.toml", lambda book: {"tenants": {"t": {"models": ['a"b']}}})


@pytest.mark.parametrize("path", ["embeddings", "responses", "moderations", "audio/speech", "images/generations"])
async def test_what_is_not_offered_says_so_and_what_is(both: Front, path: str) -> None:
    answer = await both.client.post(f"/v1/{path}", json={"model": "tiny", "input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_offered")
    assert f"/v1/{path}" in error["message"] and "POST /v1/chat/completions" in error["message"]


async def test_the_openai_client_raises_what_embeddings_are_refused_with(both: Front) -> None:
    client = openai.AsyncOpenAI(base_url=f"{both.gateway.url}/v1", api_key="none", http_client=both.client)
    with pytest.raises(openai.NotFoundError, match="embeddings are not offered here"):
        await client.embeddings.create(model="tiny", input="x")


async def test_pages_of_named_origins_may_call_and_no_others(tiny_dir: Path) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with front(tiny_dir, config={"gateway": {"cors_origins": ["https://chat.example.com"]}}) as running:
        for origin, allowed in (("https://chat.example.com", True), ("https://evil.example.com", False)):
            answer = await running.client.options("/v1/models", headers={"origin": origin, **preflight})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
    async with front(tiny_dir) as plain:
        answer = await plain.client.get("/v1/models", headers={"origin": "https://chat.example.com"})
        assert "access-control-allow-origin" not in answer.headers


async def test_every_request_leaves_a_line_that_names_no_prompt_and_no_key(tiny_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    async with front(tiny_dir, config=two(tiny_dir, usage_log=str(log))) as running:
        running.decode.script = says(9, 9)
        await ask(running, "best", prompt=["once", "twice"])
        await ask(running, "nobody-said-this")
        await eventually(lambda: running.gateway.numbers()["usage_lines_written"] == 2)
        assert running.gateway.numbers()["usage_lines_dropped"] == 0
    answered, refused = (json.loads(line) for line in log.read_text().splitlines())
    assert (answered["model"], answered["tenant"], answered["outcome"]) == ("other", "default", "ok")
    assert (answered["choices"], answered["attempts"], answered["completion_tokens"]) == (2, 2, 4)
    assert answered["prompt_tokens"] > 2 and answered["ttft_ms"] > 0 and answered["gateway"] == "gateway-0"
    assert (refused["model"], refused["outcome"], refused["prompt_tokens"]) == ("", "unknown_model", 0)
    assert "once" not in log.read_text() and "nobody" not in log.read_text()


@pytest.mark.parametrize(
    ("value", "says"), [("usage_log", "gateway.usage_log: cannot write"), ("warm_file", "FILE: cannot read")]
)
async def test_files_that_cannot_be_used_are_named_before_anything_is_served(
    tiny_dir: Path, tmp_path: Path, value: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        async with front(tiny_dir, config={"gateway": {value: str(tmp_path)}}):
            pass


async def test_prompts_of_the_warm_file_are_computed_once_a_model_has_a_path(tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text('{"prompt": "once"}\n\n{"messages": [{"role": "user", "content": "hi"}], "model": "best"}\n')
    async with front(tiny_dir, config=two(tiny_dir, warm_file=str(file))) as running:
        running.decode.script = says(9)
        await eventually(lambda: len(running.decode.jobs) == 2)
        asked = [job.attempt.request for job in running.decode.jobs]
        assert [one.sampling.max_tokens for one in asked] == [1, 1]
        assert [one.priority for one in asked] == [-100, -100]


async def test_an_adapter_answers_under_its_own_name_and_shares_no_kv_with_its_model(tiny_dir: Path, tmp_path: Path) -> None:
    for name in ("polite", "terse"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": 4, "name": name}))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"weights")
    named = {name: str(tmp_path / name) for name in ("polite", "terse")}
    async with front(tiny_dir, config={"model": {"aliases": ["small"], "adapters": named}}) as running:
        running.decode.script = says(9)

        async def sent(model: str) -> Any:
            answer = await ask(running, model)
            assert answer.status_code == 200
            return answer.json()["model"], running.decode.jobs[-1].attempt.request

        told = {model: await sent(model) for model in ("tiny", "small", "polite", "terse", "polite")}
        assert [name for name, _ in told.values()] == ["tiny", "tiny", "polite", "terse"]
        requests = {model: request for model, (_, request) in told.items()}
        assert requests["tiny"].adapter is requests["small"].adapter is None
        assert (requests["polite"].adapter.name, len(requests["polite"].adapter.digest)) == ("polite", 32)
        assert len({requests[model].namespace for model in ("tiny", "polite", "terse")}) == 3
        listed = {
            card["id"]: (card["root"], card["parent"]) for card in (await running.client.get("/v1/models")).json()["data"]
        }
        assert listed == {
            "tiny": ("tiny", None),
            "small": ("tiny", None),
            "polite": ("polite", "tiny"),
            "terse": ("terse", "tiny"),
        }
        refused = await ask(running, "rude")
        assert "use 'tiny', 'polite', 'terse'" in refused.json()["error"]["message"]


async def test_an_adapter_without_files_ends_the_start(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.adapters: 'polite': there is no .*adapter_config.json"):
        async with front(tiny_dir, config={"model": {"adapters": {"polite": str(tmp_path)}}}):
            pass
