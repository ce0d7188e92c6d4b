"""The console's routes at a real gateway, before a scripted cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.deaf_server import deaf_server
from support.gateway_front import Front, front, says
from support.scripted_cluster import Job, prefill_member

from moonpool.cluster.gateway.console import console as console_module
from moonpool.cluster.gateway.console.pages import POLICY, read_pages
from moonpool.cluster.gateway.console.routes import checked_id, require_own_name
from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.cluster.identity.exposure import console_wanted, exposures
from moonpool.core.config import Config
from moonpool.core.errors import Forbidden, InvalidRequest
from moonpool.core.request import FinishReason

GET = ("cluster", "requests", "request/req-1")


async def test_the_page_and_its_parts_are_this_gateways_own_and_nothing_of_it_is_inline(model_dir: Path) -> None:
    async with front(model_dir) as here:
        page = await here.client.get("/console")
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == POLICY
        for name in read_pages():
            part = await here.client.get(f"/console/static/{name}")
            assert (part.status_code, part.headers["x-content-type-options"]) == (200, "nosniff")
            same = await here.client.get(f"/console/static/{name}", headers={"if-none-match": part.headers["etag"]})
            assert (same.status_code, same.content) == (304, b"")
            assert "http://" not in part.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in part.text
            assert not any(
                word in part.text for word in ("innerHTML", "outerHTML", "document.write", "eval(", "style=", "onclick")
            )
        assert "<script>" not in page.text and "<style" not in page.text
        for name in ("../console.py", "..%2fconsole.py", "nothing.js", "index.html/x"):
            assert (await here.client.get(f"/console/static/{name}")).status_code == 404
        assert "/console" not in (await here.client.get("/openapi.json")).text


async def test_without_keys_a_page_of_another_site_reads_nothing(model_dir: Path) -> None:
    async with front(model_dir, config={"gateway": {"cors_origins": ["*"]}}) as here:
        for path in GET:
            assert (await here.client.get(f"/console/api/{path}")).status_code == 200
            for headers in (
                {"host": "rebound.example"},
                {"host": "localhost.example:80"},
                {"origin": "https://evil.example"},
                {"origin": "null"},
                {"origin": "http://["},
                {"sec-fetch-site": "cross-site"},
            ):
                refused = await here.client.get(f"/console/api/{path}", headers=headers)
                assert refused.status_code == 403, headers
                assert "prefill-0" not in refused.text
        for host in ("localhost:9", "127.0.0.1", "[::1]:8000", "10.0.0.7:8000"):
            require_own_name({"host": host}, Config())
        with pytest.raises(Forbidden):
            require_own_name({}, Config())


async def test_with_keys_only_admins_look_in(model_dir: Path, tmp_path: Path) -> None:
    keys = {}
    kept = []
    for role in ("user", "admin"):
        entry, keys[role] = mint()
        kept.append({"name": role, "roles": [role], **entry})
    edit_book(tmp_path / "keys.toml", lambda book: {"keys": kept})
    async with front(model_dir, config={"security": {"api_keys_file": str(tmp_path / "keys.toml")}}) as here:
        assert (await here.client.get("/console")).status_code == 200
        assert (await here.client.get("/console/static/main.js")).status_code == 200
        for path in GET:
            for role, status in (("", 401), ("user", 403), ("admin", 200)):
                headers = {"authorization": f"Bearer {keys[role]}"} if role else {}
                assert (await here.client.get(f"/console/api/{path}", headers=headers)).status_code == status
        for odd in ("/console/static/../api/cluster", "/console/static/%2e%2e/api/cluster", "/console/api/cluster%0a"):
            assert (await here.client.get(odd)).status_code in (401, 404)


@pytest.mark.parametrize(
    ("chosen", "host", "keys", "there"),
    [
        ("auto", "127.0.0.1", "", True),
        ("auto", "0.0.0.0", "", False),
        ("auto", "0.0.0.0", "keys.toml", True),
        ("on", "0.0.0.0", "", True),
        ("off", "127.0.0.1", "keys.toml", False),
    ],
)
def test_who_may_look_in_decides_whether_there_is_a_console(chosen: str, host: str, keys: str, there: bool) -> None:
    config = Config.model_validate({"gateway": {"console": chosen, "host": host}, "security": {"api_keys_file": keys}})
    assert console_wanted(config) is there


async def test_a_gateway_without_a_console_has_none_of_its_routes(model_dir: Path) -> None:
    async with front(model_dir, config={"gateway": {"console": "off"}}) as here:
        for path in ("/console", "/console/static/main.js", "/console/api/cluster"):
            assert (await here.client.get(path)).status_code == 404


async def test_ten_consoles_cost_as_much_as_one(model_dir: Path) -> None:
    async with front(model_dir) as here:
        looked = here.gateway._console
        assert looked is not None
        for _ in range(3):
            answers = await asyncio.gather(*(here.client.get("/console/api/cluster") for _ in range(10)))
            assert len({answer.content for answer in answers}) == 1
        assert looked.cluster.made == 1
        members = {one["id"]: one for one in answers[0].json()["members"]}
        assert members.keys() == {"store-b", "decode-0", "prefill-0", "conductor-0"}
        assert members["prefill-0"]["note"].startswith("UNAVAILABLE"), "it is known to membership only"


async def flight_of(here: Front, wanted: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> dict[str, Any]:
    """The first of those that the console tells, once there is one."""
    async with asyncio.timeout(10):
        while not (found := wanted((await here.client.get("/console/api/requests")).json())):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return found[0]


async def test_a_request_is_seen_on_its_way_and_afterwards(model_dir: Path) -> None:
    async with front(model_dir) as here:
        go = asyncio.Event()

        async def one_then_the_rest(job: Job) -> None:
            await job.say((1,))
            await go.wait()
            await job.say((2, 3), position=1, finish=FinishReason.LENGTH)

        here.decode.script = one_then_the_rest
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        headers = {"x-request-id": "<i>theirs</i>", "x-moonpool-kind": "batch"}
        asking = asyncio.create_task(here.client.post("/v1/completions", json=body, headers=headers))
        job = await here.decode.arrived.get()
        flight = await flight_of(here, lambda told: [one for one in told["flights"] if one["output_tokens"] == 1])
        assert (flight["stage"], flight["decode"], flight["theirs"], flight["kind"]) == (
            "decode",
            "decode-0",
            "<i>theirs</i>",
            "batch",
        )
        name = flight["id"]
        assert name == job.attempt.request.id
        under_way = (await here.client.get(f"/console/api/request/{name}")).json()
        assert under_way["found"] and under_way["waterfall"]["rows"][0]["steps"][-1]["open"]
        go.set()
        assert (await asking).status_code == 200
        ended = await flight_of(here, lambda told: told["ended"])
        assert (ended["id"], ended["outcome"], ended["output_tokens"]) == (name, "ok", 3)
        assert json.loads(here.gateway.words()["recent"])["answers"] == 1


async def test_refusals_are_counted_by_reason(model_dir: Path) -> None:
    async with front(model_dir, config={"gateway": {"max_body_bytes": 2_048}}) as here:
        here.gateway._endpoints.leaving = True
        refused = await here.client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
        assert refused.status_code == 503
        assert json.loads(here.gateway.words()["recent"])["refused"] == {"no_path": 1}


async def test_a_process_that_hangs_holds_up_neither_the_console_nor_an_answer(model_dir: Path) -> None:
    async with front(model_dir) as here, deaf_server() as (address, called):
        here.membership.say(replace(prefill_member(name="prefill-9"), address=address))
        here.decode.script = says(1, 2)
        looking = asyncio.create_task(here.client.get("/console/api/cluster"))
        assert await called.get() == "/moonpool.v1.Admin/Stats"
        answer = await here.client.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2})
        assert answer.status_code == 200 and not looking.done()
        members = {one["id"]: one for one in (await looking).json()["members"]}
        assert members["prefill-9"]["note"].startswith("DEADLINE_EXCEEDED")
        name = answer.headers["x-moonpool-request-id"]
        told = (await here.client.get(f"/console/api/request/{name}")).json()
        assert [row["member"] for row in told["waterfall"]["rows"]] == ["gateway-0"]


def test_a_console_for_everybody_is_warned_about() -> None:
    def warned(**gateway: str) -> bool:
        config = Config.model_validate({"gateway": {"console": "on", **gateway}})
        return any(one.what.startswith("gateway.console") for one in exposures(config))

    assert warned(host="0.0.0.0")
    assert not warned(host="127.0.0.1") and not warned(host="0.0.0.0", console="auto")


def test_an_id_is_a_short_printable_word() -> None:
    assert checked_id("chatcmpl-req-1") == checked_id("cmpl-req-1") == checked_id("req-1") == "req-1"
    for odd in ("", "x" * 201, "é", "a\x00b"):
        with pytest.raises(InvalidRequest):
            checked_id(odd)


def test_what_is_shown_is_bounded() -> None:
    assert console_module.MOST_MEMBERS <= 1_000
    assert console_module.MOST_FLIGHTS + console_module.MOST_ENDED <= 500
