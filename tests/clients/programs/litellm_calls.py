"""What litellm gets: ``python litellm_calls.py URL MODEL_DIR``. One line a call: its name and what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from tokenizers import Tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TEXT = "The phases of the moon are"


def show(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


def completion(where: dict[str, Any]) -> None:
    answer = litellm.completion(model="openai/smollm2", messages=QUESTION, max_tokens=16, temperature=0, **where)
    show("completion", {
        "text": answer.choices[0].message.content, "finish": answer.choices[0].finish_reason,
        "prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens,
    })  # fmt: skip


async def streamed(where: dict[str, Any]) -> None:
    parts = await litellm.acompletion(
        model="openai/smollm2", messages=QUESTION, max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True}, **where,
    )  # fmt: skip
    kept = [part async for part in parts]
    built = litellm.stream_chunk_builder(kept, messages=QUESTION)
    text = "".join(part.choices[0].delta.content or "" for part in kept if part.choices)
    show(
        "acompletion streamed", {"text": text, "prompt": built.usage.prompt_tokens, "completion": built.usage.completion_tokens}
    )


def counted(where: dict[str, Any], tokenizer: Tokenizer) -> None:
    answer = litellm.text_completion(model="text-completion-openai/smollm2", prompt=TEXT, max_tokens=8, temperature=0, **where)
    kind = {"type": "huggingface_tokenizer", "tokenizer": tokenizer}
    counted = litellm.token_counter(model="smollm2", text=TEXT, custom_tokenizer=kind)
    show("text_completion", {"text": answer.choices[0].text, "prompt": answer.usage.prompt_tokens, "token_counter": counted})


def several(where: dict[str, Any]) -> None:
    answer = litellm.completion(model="openai/smollm2", messages=QUESTION, max_tokens=4, temperature=0, n=2, **where)
    show("n", {"choices": len(answer.choices)})


def tools(where: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = litellm.completion(
        model="openai/smollm2", messages=QUESTION, max_tokens=48, temperature=0,
        tools=[{"type": "function", "function": {"name": "visit", "parameters": parameters}}],
        tool_choice={"type": "function", "function": {"name": "visit"}}, **where,
    )  # fmt: skip
    call = answer.choices[0].message.tool_calls[0].function
    show("tool call", {"name": call.name, "arguments": json.loads(call.arguments), "finish": answer.choices[0].finish_reason})


def refused(where: dict[str, Any]) -> None:
    for name, fields in {"an unknown model": {"model": "openai/gpt-4"}, "too long": {"max_tokens": 100_000}}.items():
        try:
            litellm.completion(**{"model": "openai/smollm2", "messages": QUESTION, "max_tokens": 4, **where, **fields})
        except litellm.exceptions.APIError as e:
            show(f"refused: {name}", {"raised": type(e).__name__, "status": e.status_code})
        except Exception as e:  # noqa: BLE001  what it raises is what is shown
            show(f"refused: {name}", {"raised": type(e).__name__, "status": getattr(e, "status_code", None)})


def main(url: str, model_dir: str) -> None:
    litellm.suppress_debug_info = True
    where = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    completion(where)
    asyncio.run(streamed(where))
    counted(where, Tokenizer.from_file(f"{model_dir}/tokenizer.json"))
    several(where)
    tools(where)
    refused(where)


if __name__ == "__main__":
    main(*sys.argv[1:3])
