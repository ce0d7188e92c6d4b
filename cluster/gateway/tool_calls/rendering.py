"""Tools and calls as chat templates see them; and as text, for templates that have no place for them. Pure.

That text is what Hermes and Qwen models were trained with: the tools in the system message, calls in the assistant's,
results in the user's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moonpool.cluster.gateway.tool_calls.hermes import CLOSE, OPEN

Message = Mapping[str, Any]

_SECTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""
_SYSTEM = "You are a helpful assistant."
_TEXT_BEFORE, _TEXT_AFTER = "\U000f0000", "\U000f0001"  # the library encodes control tokens between these as text


def in_text(messages: Iterable[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with tools, calls and results as plain text of the roles that every template knows."""
    out: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if before == "tool":  # of one turn's calls: many templates want user and assistant to take turns
                out[-1]["content"] += f"\n{result}"
            else:
                out.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            calls = "\n".join(_call(one["function"]) for one in message["tool_calls"])
            out.append({"role": role, "content": f"{content}\n{calls}" if content else calls})
        else:
            out.append(dict(message))
        before = role
    if tools:
        section = _SECTION.format(tools="\n".join(_json(tool) for tool in tools), open=OPEN, close=CLOSE)
        if not out or out[0]["role"] != "system":
            out.insert(0, {"role": "system", "content": _SYSTEM})
        out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{section}"}
    return out


def _call(function: Mapping[str, Any]) -> str:
    return f"{OPEN}\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n{CLOSE}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_names(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Results that do not say which function they are of get its name from their call: some templates ask for it."""
    out: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        unnamed = message["role"] == "tool" and "name" not in message and name is not None
        out.append({**message, "name": name} if unnamed else dict(message))
    return out


def with_short_ids(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Ids of calls as nine hexadecimal digits: the same id stays the same."""
    out = []
    for message in messages:
        changed = dict(message)
        if changed.get("tool_call_id"):
            changed["tool_call_id"] = _short(changed["tool_call_id"])
        if changed.get("tool_calls"):
            changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in changed["tool_calls"]]
        out.append(changed)
    return out


def _short(id: str) -> str:
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def with_names_as_text(value: Any, control: re.Pattern[str]) -> Any:
    """``value`` with control tokens in names of fields marked as text: the library does so for what the fields hold only."""
    if isinstance(value, Mapping):
        return {_as_text(str(key), control): with_names_as_text(one, control) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_names_as_text(one, control) for one in value]
    return value


def _as_text(name: str, control: re.Pattern[str]) -> str:
    name = name.replace(_TEXT_BEFORE, "").replace(_TEXT_AFTER, "")
    return control.sub(lambda found: f"{_TEXT_BEFORE}{found[0]}{_TEXT_AFTER}", name)
