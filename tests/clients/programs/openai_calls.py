"""What the openai package gets: ``python openai_calls.py URL MODEL_DIR``. One line a call: its name and what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Capital(BaseModel):
    country: str
    continent: str


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["Paris", "London", "Rome"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def show(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 16, "messages": QUESTION, **fields}
    return client.chat.completions.create(**settings)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 8, "prompt": "The moon is", **fields}
    return client.completions.create(**settings)


def used(usage: Any) -> dict[str, int]:
    return {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "total": usage.total_tokens}


def whole_and_streamed(client: openai.OpenAI) -> None:
    show("models", [model.id for model in client.models.list()])
    answer = chat(client)
    show("chat", {"text": answer.choices[0].message.content, "finish": answer.choices[0].finish_reason, **used(answer.usage)})
    text, roles, finish, usage = "", [], None, None
    for part in chat(client, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            finish = choice.finish_reason or finish
    show("chat streamed", {"text": text, "roles": roles, "finish": finish, **used(usage)})
    with client.chat.completions.stream(model="smollm2", temperature=0, max_tokens=16, messages=QUESTION) as stream:
        kinds = {event.type for event in stream}
        show("chat stream helper", {"text": stream.get_final_completion().choices[0].message.content, "events": sorted(kinds)})
    one = complete(client)
    show("completion", {"text": one.choices[0].text, "finish": one.choices[0].finish_reason, **used(one.usage)})
    several = complete(client, prompt=["The moon is", "The sun is"])
    show("completion of two prompts", {"texts": [c.text for c in several.choices], **used(several.usage)})
    ids = complete(client, prompt=[504, 11066, 314], extra_body={"return_token_ids": True})
    show("completion of ids", {"ids": ids.choices[0].model_extra["token_ids"], **used(ids.usage)})
    streamed = "".join(part.choices[0].text for part in complete(client, stream=True) if part.choices)
    show("completion streamed", {"text": streamed})


def sampled(client: openai.OpenAI) -> None:
    same = [chat(client, temperature=1, seed=7).choices[0].message.content for _ in range(2)]
    show("equal seeds", {"equal": same[0] == same[1]})
    stopped = chat(client, stop=["Paris"])
    show("stop", {"text": stopped.choices[0].message.content, "finish": stopped.choices[0].finish_reason})
    likely = chat(client, max_tokens=2, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    show(
        "chat logprobs",
        [{"token": t.token, "logprob": round(t.logprob, 3), "top": [o.token for o in t.top_logprobs]} for t in likely],
    )
    lists = complete(client, max_tokens=2, logprobs=2).choices[0].logprobs
    show("completion logprobs", {"tokens": lists.tokens, "logprobs": [round(x, 3) for x in lists.token_logprobs]})
    limit = chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
    show("max_completion_tokens", used(limit.usage))


def several(client: openai.OpenAI) -> None:
    greedy = chat(client, n=2)
    show(
        "n",
        {
            "texts": [c.message.content for c in greedy.choices],
            "indexes": [c.index for c in greedy.choices],
            **used(greedy.usage),
        },
    )
    indexes = {choice.index for part in chat(client, n=2, stream=True, temperature=1, seed=3) for choice in part.choices}
    show("n streamed", {"indexes": sorted(indexes)})
    best = complete(client, best_of=2, temperature=1, seed=3)
    show("best_of", {"choices": len(best.choices)})


def scored(client: openai.OpenAI) -> None:
    scored = complete(client, prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0)
    lists = scored.choices[0].logprobs
    show("echo", {
        "text": scored.choices[0].text, "tokens": lists.tokens, "offsets": lists.text_offset,
        "logprobs": [None if x is None else round(x, 3) for x in lists.token_logprobs], **used(scored.usage),
    })  # fmt: skip


def tools(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(client, messages=ask, tools=[WEATHER], tool_choice=named, max_tokens=64).choices[0]
    call = answer.message.tool_calls[0]
    show(
        "tool call",
        {"name": call.function.name, "arguments": json.loads(call.function.arguments), "finish": answer.finish_reason},
    )
    name, arguments, finish = "", "", None
    for part in chat(client, messages=ask, tools=[WEATHER], tool_choice=named, max_tokens=64, stream=True):
        for choice in part.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    show("tool call streamed", {"name": name, "arguments": json.loads(arguments), "finish": finish})
    result = [
        *ask,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'},
    ]
    show(
        "after the tool",
        {"finish": chat(client, messages=result, tools=[WEATHER], tool_choice="none").choices[0].finish_reason},
    )


def shaped(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, max_tokens=48)
    show("json_schema", json.loads(answer.choices[0].message.content))
    parsed = client.chat.completions.parse(
        model="smollm2", temperature=0, max_tokens=200, messages=QUESTION, response_format=Capital
    )
    show("parsed", {"kind": type(parsed.choices[0].message.parsed).__name__})


def refused(client: openai.OpenAI) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "temperature 3": lambda: chat(client, temperature=3),
        "an unknown model": lambda: chat(client, model="gpt-4"),
        "too long": lambda: chat(client, max_tokens=100_000),
        "embeddings": lambda: client.embeddings.create(model="smollm2", input="x"),
        "a deadline of 1 ms": lambda: chat(client, extra_headers={"x-deadline-ms": "1"}),
    }
    for name, call in calls.items():
        try:
            call()
        except openai.APIStatusError as e:
            show(f"refused: {name}", {"raised": type(e).__name__, "status": e.status_code, "code": e.code, "param": e.param})
    try:
        chat(client.with_options(timeout=0.001))
    except openai.APITimeoutError as e:
        show("refused: a time-out of 1 ms", {"raised": type(e).__name__})


def raw(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="smollm2", max_tokens=1, messages=QUESTION, extra_headers={"x-request-id": "mine-1"}
    )
    ours = answer.headers["x-moonpool-request-id"]
    show(
        "raw response",
        {"status": answer.status_code, "echoed": answer.request_id, "ours": ours[:4], "parsed": type(answer.parse()).__name__},
    )


async def cancelled(url: str) -> None:
    """A stream closed amid its answer, and a call whose task is cancelled."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        long = {"model": "smollm2", "max_tokens": 2000, "messages": QUESTION, "extra_body": {"ignore_eos": True}}
        stream = await client.chat.completions.create(stream=True, **long)
        parts = 0
        async for _ in stream:
            parts += 1
            if parts == 3:
                break
        await stream.close()
        call = asyncio.create_task(client.chat.completions.create(**long))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.wait([call])
        show("cancelled", {"parts read": parts, "task": "cancelled" if call.cancelled() else "done"})


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for calls in (whole_and_streamed, sampled, several, scored, tools, shaped, refused, raw):
            calls(client)
    asyncio.run(cancelled(f"{url}/v1"))


if __name__ == "__main__":
    main(sys.argv[1])
