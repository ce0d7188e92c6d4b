"""Clients that are libraries: what their calls return and raise against a live cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.client_commands import PAGE, Places, program
from support.clients import Client
from support.clients_page import Notebook
from support.cluster import LocalCluster
from tokenizers import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.timeout(900)]


def facts(client: Client, name: str, at: Places, scratch: Path, notebook: Notebook) -> dict[str, Any]:
    """What the program printed: one fact a line."""
    out = client.run(program(name, at), scratch, limit_s=300)
    notebook.add(client.name, program(name, PAGE), out)
    found: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.mark.clients("openai")
def test_the_openai_package_gets_all_that_it_asks_for(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook, tokenizer: Tokenizer
) -> None:
    found = facts(client, "openai_calls", at, scratch, notebook)
    text = found["chat"]["text"]
    assert found["models"] == ["smollm2"]
    assert "Paris" in text
    assert found["chat streamed"] == {**found["chat"], "roles": ["assistant"]}
    assert found["chat stream helper"]["text"] == text
    assert {"chunk", "content.delta", "content.done"} <= set(found["chat stream helper"]["events"])
    assert found["completion"]["prompt"] == len(tokenizer.encode("The moon is").ids)
    assert found["completion"]["total"] == found["completion"]["prompt"] + found["completion"]["completion"]
    assert found["completion of two prompts"]["texts"][0] == found["completion"]["text"] == found["completion streamed"]["text"]
    assert len(found["completion of ids"]["ids"]) == 8 and found["completion of ids"]["prompt"] == 3
    assert found["equal seeds"] == {"equal": True}
    assert found["stop"] == {"text": text.partition("Paris")[0], "finish": "stop"}
    assert all(one["top"][0] == one["token"] and one["logprob"] <= 0 for one in found["chat logprobs"])
    assert len(found["completion logprobs"]["tokens"]) == 2
    assert found["max_completion_tokens"]["completion"] == 3
    assert found["raw response"] == {"status": 200, "echoed": "mine-1", "ours": "req-", "parsed": "ChatCompletion"}
    assert found["cancelled"] == {"parts read": 3, "task": "cancelled"}
    check_several(found, text)
    check_scored(found, tokenizer)
    check_tools(found)
    check_refused(found)
    cluster.assert_idle()


def check_several(found: dict[str, Any], text: str) -> None:
    assert found["n"]["texts"] == [text, text] and found["n"]["indexes"] == [0, 1]
    assert found["n"]["prompt"] == found["chat"]["prompt"], "the prompt of several answers counts once"
    assert found["n"]["completion"] == 2 * found["chat"]["completion"]
    assert found["n streamed"] == {"indexes": [0, 1]}
    assert found["best_of"] == {"choices": 1}


def check_scored(found: dict[str, Any], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is Paris").ids
    echo = found["echo"]
    assert echo["text"] == "The capital of France is Paris" == "".join(echo["tokens"])
    assert len(echo["tokens"]) == len(echo["logprobs"]) == echo["prompt"] == len(ids)
    assert echo["logprobs"][0] is None and all(value <= 0 for value in echo["logprobs"][1:])
    assert echo["offsets"] == [len("".join(echo["tokens"][:i])) for i in range(len(ids))]
    assert echo["completion"] == 0


def check_tools(found: dict[str, Any]) -> None:
    call = found["tool call"]
    assert call["name"] == "get_weather" and set(call["arguments"]) == {"city", "unit"}
    assert call["arguments"]["unit"] in ("celsius", "fahrenheit")
    assert found["tool call streamed"] == call
    assert found["after the tool"]["finish"] in ("stop", "length")
    assert set(found["json_schema"]) == {"answer", "sure"} and found["json_schema"]["answer"] in ("Paris", "London", "Rome")
    assert found["parsed"] == {"kind": "Capital"}


def check_refused(found: dict[str, Any]) -> None:
    assert found["refused: temperature 3"] == {
        "raised": "BadRequestError", "status": 400, "code": "invalid_request", "param": "temperature",
    }  # fmt: skip
    assert found["refused: an unknown model"]["raised"] == "NotFoundError"
    assert found["refused: an unknown model"]["code"] == "model_not_found"
    assert found["refused: too long"]["code"] == "context_length_exceeded"
    assert found["refused: embeddings"]["status"] in (400, 404, 501)
    assert found["refused: a deadline of 1 ms"]["status"] == 504
    assert found["refused: a time-out of 1 ms"] == {"raised": "APITimeoutError"}


@pytest.mark.clients("litellm")
def test_litellm_completes_streams_and_counts_as_the_tokenizer_does(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook
) -> None:
    found = facts(client, "litellm_calls", at, scratch, notebook)
    assert "Paris" in found["completion"]["text"]
    streamed = found["acompletion streamed"]
    assert streamed == {name: found["completion"][name] for name in ("text", "prompt", "completion")}
    assert found["text_completion"]["prompt"] == found["text_completion"]["token_counter"]
    assert found["n"] == {"choices": 2}
    assert found["tool call"]["name"] == "visit" and found["tool call"]["arguments"]["city"] in ("Paris", "Rome")
    assert found["refused: an unknown model"] == {"raised": "NotFoundError", "status": 404}
    assert found["refused: too long"]["status"] == 400
    cluster.assert_idle()


@pytest.mark.clients("langchain-openai")
def test_langchain_invokes_streams_binds_tools_and_gets_structures(
    client: Client, cluster: LocalCluster, at: Places, scratch: Path, notebook: Notebook
) -> None:
    found = facts(client, "langchain_calls", at, scratch, notebook)
    assert "Paris" in found["invoke"]["text"]
    assert found["stream"] == {name: found["invoke"][name] for name in ("text", "prompt", "completion")}
    assert found["batch"] == {"answers": 2}
    assert found["ainvoke"]["text"] == found["invoke"]["text"]
    for name in ("bind_tools", "bind_tools streamed"):
        assert found[name]["name"] == "Visit" and found[name]["arguments"]["city"] in ("Paris", "Rome")
    for method in ("json_schema", "function_calling"):
        assert found[f"with_structured_output, {method}"]["kind"] == "Visit"
    cluster.assert_idle()
