"""Families of models by how they write tool calls, and which one a chat template belongs to. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moonpool.cluster.gateway.tool_calls import hermes, llama3, mistral
from moonpool.cluster.gateway.tool_calls.reading import ToolParser

MAX_CALLS = 16  # of an answer that is made to call
NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


class MakeParser(Protocol):
    def __call__(self, names: Collection[str], *, parallel: bool) -> ToolParser: ...


@dataclass(frozen=True, slots=True)
class Family:
    """``marks``: text that its parser looks for; special tokens among them have to stay visible to it.

    An answer with calls is written ``first``, then per call ``before``, the call, ``after``, with ``between`` between them,
    then ``last``. ``apart`` is written instead of ``first`` where an answer may be other JSON: both would begin with a brace,
    and a grammar cannot wait to see which it is. ``arguments`` is the name that the call's object gives them.
    ``short_ids``: its templates want the ids of calls to be nine letters or digits.
    """

    name: str
    parser: MakeParser
    marks: tuple[str, ...]
    arguments: str = "arguments"
    first: str = ""
    apart: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    last: str = ""
    short_ids: bool = False


HERMES = Family(
    "hermes",
    hermes.HermesParser,
    (hermes.OPEN, hermes.CLOSE),
    before=f"{hermes.OPEN}\n",
    after=f"\n{hermes.CLOSE}",
    between="\n",
)
LLAMA3 = Family(
    "llama3_json",
    llama3.Llama3Parser,
    (llama3.OPEN,),
    arguments="parameters",
    apart=llama3.OPEN,
    between=f"{llama3.BETWEEN} ",
)
MISTRAL = Family(
    "mistral",
    mistral.MistralParser,
    (mistral.OPEN, mistral.ARGS),
    first=f"{mistral.OPEN}[",
    between=", ",
    last="]",
    short_ids=True,
)
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL)}


def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


def family_of(template: str) -> Family | None:
    """By what the template's text says of calls; None: it has a way of its own, which is not known here."""
    if not knows_tools(template):
        return HERMES  # they are explained to the model in that way: see ``rendering``
    if mistral.OPEN in template:
        return MISTRAL
    if hermes.OPEN in template:
        return None if "<function=" in template else HERMES
    if llama3.OPEN in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return None


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as a grammar needs it; ``schema`` describes the object of its arguments."""

    name: str
    schema: Mapping[str, Any]


def calling_grammar(
    family: Family,
    functions: Sequence[Function],
    special_ids: Mapping[str, int],
    *,
    parallel: bool,
    or_else: Mapping[str, Any] | None = None,
) -> str:
    """Lark text of an answer that is one call, or up to ``MAX_CALLS``; or JSON of the schema ``or_else``.

    Schemas are taken as they are. ``special_ids`` are those of the vocabulary's special tokens, by text.
    """
    first = family.first if or_else is None else family.apart or family.first
    lines = [f"start: calls{' | answer' if or_else is not None else ''}"]
    lines += _calls(family, first, family.before, functions, special_ids, several=parallel)
    if or_else is not None:
        lines.append(f"answer: %json {json.dumps(or_else)}")
    return "\n".join(lines) + "\n"


def free_grammar(family: Family, functions: Sequence[Function], special_ids: Mapping[str, int], *, parallel: bool) -> str:
    """Lark text of any answer whose calls, should there be some, follow their schemas."""
    if family.apart:  # its calls are the whole answer
        lines = ["start: calls | other?", "other: /[^{ \\t\\r\\n](.|\\n)*/"]
        return "\n".join(lines + _calls(family, "", family.before, functions, special_ids, several=parallel)) + "\n"
    mark = family.marks[0]
    lazy = "" if mark in special_ids else "[lazy]"
    lines = ["start: (head calls)* tail", f"head{lazy}: TEXT {_literal(mark, special_ids)}", "tail: TEXT", "TEXT: /(.|\\n)*/"]
    first, before = family.first.removeprefix(mark), family.before.removeprefix(mark)
    return "\n".join(lines + _calls(family, first, before, functions, special_ids, several=bool(first) and parallel)) + "\n"


def _calls(
    family: Family,
    first: str,
    before: str,
    functions: Sequence[Function],
    special_ids: Mapping[str, int],
    *,
    several: bool,
) -> list[str]:
    """The rule ``calls`` and what it is made of."""
    more = f" (between call){{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [
        f"calls: {_literal(first, special_ids)} call{more} {_literal(family.last, special_ids)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    if several:
        lines.append(f"between: {_literal(family.between, special_ids)}")
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{family.arguments}": '
        opening, closing = _literal(before + head, special_ids), _literal("}" + family.after, special_ids)
        lines.append(f"call_{i}: {opening} %json {json.dumps(function.schema)} {closing}")
    return lines


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Lark for ``text``: special tokens by their id, the rest quoted; nothing for no text."""
    found = sorted((mark for mark in special_ids if mark in text), key=len, reverse=True)  # of hundreds, at most one or two
    marks = "|".join(map(re.escape, found))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(f"<[{special_ids[p]}]>" if p in special_ids else json.dumps(p) for p in parts if p)
