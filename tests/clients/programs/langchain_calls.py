"""What langchain-openai gets: ``python langchain_calls.py URL MODEL_DIR``. One line a call: its name and what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = [SystemMessage("You answer in one sentence."), HumanMessage("What is the capital of France?")]


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def show(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


def counts(message: Any) -> dict[str, int]:
    usage = message.usage_metadata
    return {"prompt": usage["input_tokens"], "completion": usage["output_tokens"]}


def plain(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    show("invoke", {"text": answer.content, "finish": answer.response_metadata["finish_reason"], **counts(answer)})
    whole = None
    for part in model.stream(QUESTION):
        whole = part if whole is None else whole + part
    show("stream", {"text": whole.content, **counts(whole)})
    show("batch", {"answers": len(model.batch([QUESTION, QUESTION]))})
    show("ainvoke", {"text": asyncio.run(model.ainvoke(QUESTION)).content})


def tools(model: ChatOpenAI) -> None:
    bound = model.bind_tools([Visit], tool_choice="Visit")
    (call,) = bound.invoke(QUESTION).tool_calls
    show("bind_tools", {"name": call["name"], "arguments": call["args"]})
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    show("bind_tools streamed", {"name": whole.tool_calls[0]["name"], "arguments": whole.tool_calls[0]["args"]})


def shaped(model: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Visit, method=method).invoke(QUESTION)
        show(f"with_structured_output, {method}", {"kind": type(found).__name__, **found.model_dump()})


def main(url: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="smollm2", temperature=0, max_tokens=48, max_retries=0, stream_usage=True
    )
    plain(model)
    tools(model)
    shaped(model)


if __name__ == "__main__":
    main(sys.argv[1])
