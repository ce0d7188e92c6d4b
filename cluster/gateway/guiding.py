"""From a request body to the guide of its answer, compiled before anything is placed, and to the parser of its calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.cluster.gateway.bodies import ChatBody, SamplingBody
from moonpool.cluster.gateway.structured import MAX_GUIDE_BYTES, schema_text
from moonpool.cluster.gateway.tokenizer import Tokenizer
from moonpool.cluster.gateway.tool_calls.families import Family, Function, calling_grammar, free_grammar
from moonpool.cluster.gateway.tool_calls.reading import ToolParser
from moonpool.core.errors import InvalidRequest
from moonpool.core.request import Guide, GuideKind
from moonpool.engine.guides import Guides, written_as
from moonpool.kvstore.fair_turns import FairTurns

MAX_TOOLS_BYTES = 4 * MAX_GUIDE_BYTES  # of a grammar of all tools
COMPILE_S = 4.0  # of the processor
STEP_S = 0.01  # of the processor, for each id: a share of a decode step, which all answers of a batch wait for
_ANY_OBJECT = {"type": "object"}
_NO_PARSER = (
    "tools: how this model writes tool calls is not known; set model.tool_parser, set tool_choice to none, or leave tools out"
)


def guide_of(body: SamplingBody, family: Family | None, special_ids: Mapping[str, int]) -> tuple[str, Guide] | None:
    """The guide that ``body`` asks for, and the field that does. InvalidRequest where the model cannot be asked so."""
    guided = body.guided
    if not isinstance(body, ChatBody) or not body.callable:
        return guided
    if family is None:
        raise InvalidRequest(_NO_PARSER, param="tools")
    if not body.must_call and not body.strict and guided is None:
        return None
    answer = None if body.must_call or guided is None else _answer_schema(*guided)
    functions = _checked(body.functions)
    if body.must_call or answer is not None:
        text = calling_grammar(family, functions, special_ids, parallel=body.several_calls, or_else=answer)
    else:
        text = free_grammar(family, functions, special_ids, parallel=body.several_calls)
    if len(text) > MAX_TOOLS_BYTES:
        raise _too_large(len(text))
    return ("tools" if guided is None else guided[0]), Guide(GuideKind.GRAMMAR, text)


def _checked(functions: Sequence[Function]) -> list[Function]:
    """As they are written into a grammar. InvalidRequest where one is too large, or all of them together are."""
    out, size = [], 0
    for i, one in enumerate(functions):
        size += len(schema_text(f"tools[{i}].function.parameters", dict(one.schema)))
        if size > MAX_TOOLS_BYTES:
            raise _too_large(size)
        out.append(Function(one.name, written_as(one.schema)))
    return out


def _too_large(size: int) -> InvalidRequest:
    return InvalidRequest(f"tools: {size} bytes of schemas or more; use at most {MAX_TOOLS_BYTES}", param="tools")


def _answer_schema(field: str, guide: Guide) -> dict[str, object]:
    if guide.kind is GuideKind.JSON_OBJECT:
        return written_as(_ANY_OBJECT)
    if guide.kind is GuideKind.JSON_SCHEMA:
        return written_as(json.loads(guide.text))
    raise InvalidRequest(f"{field}: given beside tools; set tool_choice to none, or use response_format", param=field)


class Guiding:
    """Compiles guides off the event loop, one after the other, tenants in turn; what was compiled before is free."""

    def __init__(self, guides: Guides, tokenizer: Tokenizer) -> None:
        self._guides = guides
        self._tokens = tokenizer.tokens
        self._family = tokenizer.family
        self._special_ids = tokenizer.special_ids
        marks = self._family.marks if self._family is not None else ()
        self._marks = {self._special_ids[mark]: mark.encode() for mark in marks if mark in self._special_ids}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gateway-grammars")
        self._turns = FairTurns(1)

    async def of(self, body: SamplingBody, tenant: str) -> Guide | None:
        """InvalidRequest that names the field and says why where it cannot be compiled."""
        found = guide_of(body, self._family, self._special_ids)
        if found is None:
            return None
        field, guide = found
        if not self._guides.knows(guide):
            async with self._turns.turn(tenant, len(guide.text)):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, body, field, guide)
        return guide

    def _compile(self, body: SamplingBody, field: str, guide: Guide) -> None:
        try:
            self._guides.judge(guide, compile_s=COMPILE_S, step_s=STEP_S)
        except InvalidRequest as e:
            where = field if field != "tools" else self._culprit(body)
            raise InvalidRequest(f"{where}: {e.message}", param=where) from e

    def _culprit(self, body: SamplingBody) -> str:
        """The tool whose schema is to blame, where it is one."""
        for i, function in enumerate(body.functions if isinstance(body, ChatBody) else ()):
            try:
                schema = Guide(GuideKind.JSON_SCHEMA, json.dumps(function.schema))
                self._guides.judge(schema, compile_s=COMPILE_S, step_s=STEP_S)
            except InvalidRequest:
                return f"tools[{i}].function.parameters"
        return "tools"

    def parser(self, body: SamplingBody) -> ToolParser | None:
        """A new one for each answer to ``body``; None where it can make no calls."""
        if self._family is None or not isinstance(body, ChatBody) or not body.callable:
            return None
        names = frozenset(one.name for one in body.functions)
        return self._family.parser(names, parallel=body.several_calls)

    def bytes_of(self, body: SamplingBody) -> Callable[[int], bytes]:
        """The text of ids in an answer to ``body``: special tokens that open or close a call are not hidden from a parser."""
        text_bytes, marks = self._tokens.text_bytes, self._marks
        if not marks or not isinstance(body, ChatBody) or not body.callable:
            return text_bytes
        return lambda token: marks.get(token) or text_bytes(token)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
