"""Prompts of a file, computed ahead: what a line may say, and what becomes of lines that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.cluster.warming import TRIES, WarmPrompt, read_prompts, warm
from moonpool.core.errors import ConfigError, InvalidRequest, Overloaded


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: it is no JSON object"),
        ("{}", "exactly one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "exactly one of prompt and messages"),
        ('{"prompt": "a", "max_tokens": 9}', "'max_tokens' has no place in it"),
        ('{"prompt": "a", "tools": []}', "'tools' has no place in it"),
        ('{"prompt": "a", "tenant": 3}', "tenant and model are names"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError) as e:
        list(read_prompts(file))
    assert says in e.value.message and "warm.jsonl" in e.value.message


def test_lines_become_requests_for_one_token_of_the_model_they_name_or_the_default(tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text('{"prompt": [1, 2], "cache_salt": "s"}\n\n{"messages": [], "tools": [], "model": "b", "tenant": "t"}\n')
    one, two = read_prompts(file)
    assert (one.endpoint, one.line, one.tenant, two.endpoint, two.line, two.tenant) == ("completions", 1, "", "chat", 3, "t")
    assert json.loads(one.raw("a")) == {
        "model": "a", "prompt": [1, 2], "cache_salt": "s", "max_tokens": 1, "temperature": 0, "priority": 100,
    }  # fmt: skip
    assert json.loads(two.raw("a"))["model"] == "b" and "tenant" not in json.loads(two.raw("a"))


async def test_every_prompt_is_sent_once_those_refused_for_now_again_and_failures_hold_up_nobody() -> None:
    sent: list[int] = []

    async def send(prompt: WarmPrompt) -> tuple[int, int]:
        sent.append(prompt.line)
        if prompt.line == 3 and sent.count(3) < 3:
            raise Overloaded("later", retry_after_s=0.0)
        if prompt.line == 5:
            raise InvalidRequest("prompt: too long")
        if prompt.line == 6:
            raise Overloaded("never", retry_after_s=0.0)
        return 10, 4

    done = await warm((WarmPrompt(line, "chat", {}) for line in range(8)), send, 3)
    assert (done.prompts, done.failed, done.prompt_tokens, done.cached_tokens, done.computed_tokens) == (6, 2, 60, 24, 36)
    assert done.first_error == "line 5: prompt: too long"
    assert sorted(set(sent)) == list(range(8)) and sent.count(3) == 3 and sent.count(6) == TRIES
