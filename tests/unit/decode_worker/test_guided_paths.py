"""A guided answer is the same over every path and over resuming, and what ends it does not touch the answers beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path
from support.tiny_chat_model import make_tiny_chat_model
from support.tiny_tokenizer import ids_of
from support.workers import generate
from tokenizers import Tokenizer

from moonpool.core.errors import InvalidRequest, Reason
from moonpool.core.request import FinishReason, Guide, GuideKind, Request
from moonpool.engine.guides import Guides

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
GUIDE = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_model(tmp_path_factory.mktemp("chat"))


def guided(split: Split, model: Path, **sampling: Any) -> Request:
    return split.asker.request(ids_of(model, "say something"), **{"max_tokens": 120, "guide": GUIDE, **sampling})


async def ids_over(split: Split, request: Request) -> list[int]:
    answer = await split.gateway.ask(request)
    assert answer.error is None and answer.finish is FinishReason.STOP
    return answer.ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
async def test_every_path_gives_the_same_answer_and_it_follows_its_schema(
    tmp_path: Path, chat_model: Path, sampling: dict[str, Any]
) -> None:
    found = []
    for prefills in (1, 0):
        async with split_path(tmp_path / str(prefills), chat_model, prefills=prefills) as split:
            request = guided(split, chat_model, **sampling)
            found += [await ids_over(split, request), generate(split.decode._engine, request)]
    assert found == [found[0]] * 4
    text = Tokenizer.from_file(str(chat_model / "tokenizer.json")).decode(found[0])
    assert set(json.loads(text)) == {"word", "n"}


async def test_a_resumed_attempt_goes_on_within_the_grammar(tmp_path: Path, chat_model: Path) -> None:
    async with split_path(tmp_path, chat_model) as split:
        whole = await ids_over(split, guided(split, chat_model))
        for emitted in (1, 5, len(whole) - 1):
            answer = split.gateway.begin(guided(split, chat_model), number=2, emitted=whole[:emitted])
            await answer.over.wait()
            assert (answer.error, whole[:emitted] + answer.ids) == (None, whole)


async def test_a_guide_that_fails_on_the_way_ends_its_own_answer_only(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, doomed = Guides.allowed, Guide(GuideKind.REGEX, "x{50}")

    def failing(self: Guides, guide: Guide, outputs: list[int]) -> Any:
        if guide == doomed and len(outputs) == 4:
            raise InvalidRequest("the answer cannot go on within its grammar: as the test says")
        return real(self, guide, outputs)

    monkeypatch.setattr(Guides, "allowed", failing)
    async with split_path(tmp_path, chat_model) as split:
        alone = await ids_over(split, guided(split, chat_model))
        beside, ended = await asyncio.gather(
            split.gateway.ask(guided(split, chat_model)), split.gateway.ask(guided(split, chat_model, guide=doomed))
        )
        assert (beside.error, beside.ids) == (None, alone)
        assert ended.error is not None and ended.error.reason is Reason.INVALID_REQUEST
        assert len(ended.ids) == 4
        await split.idle()
