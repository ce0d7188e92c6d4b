"""The way between gateway and worker carries nothing any more, while both live and the registry says so."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.gateway_front import front, says
from support.line import Line
from support.scripted_cluster import Job, ScriptedDecode, serve
from support.tiny_tokenizer import ids_of

from moonpool.core.ids import Role
from moonpool.core.placement import Placement, PlaceRequest
from moonpool.wire.links import ANSWER_S, KEEPALIVE_S

BODY: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 20}


async def test_an_answer_goes_on_at_another_worker_when_the_link_to_the_first_is_cut_in_its_middle(tiny_dir: Path) -> None:
    async with front(tiny_dir) as tiny, Line(int(tiny.decode_server.member.address.split(":")[1])) as line:
        ids = ids_of(tiny.model_dir, "once upon a time")
        cut = replace(tiny.decode_server.member, address=f"127.0.0.1:{line.port}")
        tiny.membership.say(cut)
        other = ScriptedDecode(says(*ids))
        second = await serve(Role.DECODE, other, name="decode-1")
        tiny.membership.say(second.member)
        heard: list[str] = []
        given_up = asyncio.Event()
        behind = replace(tiny.decode_server.ref, address=cut.address)

        def decide(request: PlaceRequest) -> Placement:
            ref = second.ref if cut.id in request.exclude else behind
            return Placement(ref, ref, booking=1)

        async def begins(job: Job) -> None:
            await job.say(ids[:2])
            try:
                await job.cancelled.wait()
            finally:
                given_up.set()

        async def cut_in_the_middle() -> None:
            async with tiny.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
                async for text in answer.aiter_text():
                    heard.append(text)
                    line.fall_silent()

        tiny.conductor.decide, tiny.decode.script = decide, begins
        try:
            async with asyncio.timeout(KEEPALIVE_S + ANSWER_S + 10):
                await cut_in_the_middle()
                await given_up.wait()  # the worker has noticed, too
            (rest,) = other.jobs
            assert 0 < len(rest.attempt.emitted) <= 2
            words = [json.loads(line)["choices"][0]["text"] for line in re.findall(r"data: (\{.*\})", "".join(heard))]
            assert "".join(words) == "once upon a time"
        finally:
            await second.kill()
