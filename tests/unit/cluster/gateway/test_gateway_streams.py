"""Answers over real HTTP: framing, text, usage, finish reasons."""

from __future__ import annotations

import json

from support.gateway_front import Front, says
from support.tiny_tokenizer import ids_of

from moonpool.core.request import FinishReason


async def test_a_completion_is_answered_in_one_object(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "the end"), finish=FinishReason.LENGTH, cached=2)
    answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": "once"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["text"] == "the end"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_chat_streams(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "hello"), finish=FinishReason.LENGTH)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = await tiny.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello"
