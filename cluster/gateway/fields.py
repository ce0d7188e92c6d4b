"""From bytes to a checked body, or to an error that names field, value and fix.

Beside the fields a body declares:

* harmless ones of OpenAI's API are accepted and ignored (``IGNORED``);
* ones that would change the answer are accepted at the value that changes nothing (``NEUTRAL``) and refused otherwise;
* anything else is an error that offers the nearest known name. ``null`` means absent everywhere.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from moonpool.core.errors import InvalidRequest

B = TypeVar("B", bound=BaseModel)
MAX_FIELDS = 256  # of one object; the unknown ones among them are an error each

IGNORED = frozenset(
    {
        "metadata",
        "request_id",  # of the client's own books; ours is in the response header
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),  # of a chat: only its template writes them
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty_decay": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class FieldRefusal(ValueError):
    """Carries our own exception through pydantic."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(error.message)
        self.error = error


def refusal(field: str, text: str) -> FieldRefusal:
    return FieldRefusal(InvalidRequest(f"{field}: {text}", param=field))


class Body(BaseModel):
    """A request body, or an object within one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Fields that are null are absent."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise refusal("body", f"an object in it has {len(value)} fields; leave out those that mean nothing")
        return {name: one for name, one in value.items() if one is not None}


def checked(kind: type[B], raw: bytes, hints: Mapping[str, str]) -> B:
    """``hints`` say what would be right for fields of several kinds, whose own errors would name them all."""
    fields = _known(kind, _load(raw))
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        raise _explain(e.errors(include_url=False), hints) from None


def _load(raw: bytes) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as e:
        raise InvalidRequest(f"body: not valid JSON: {e}; send one JSON object in UTF-8") from e
    if not isinstance(value, dict):
        raise InvalidRequest(f"body: {_shown(value)} is not an object; send one JSON object")
    return value


def _known(kind: type[BaseModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The declared fields of ``body`` that are not null."""
    kept = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in kind.model_fields:
            kept[name] = value
        elif name in NEUTRAL:
            if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in NEUTRAL[name]):
                allowed = " or ".join(_shown(good) for good in NEUTRAL[name])
                fix = f"leave it out or use {allowed}" if allowed else "leave it out"
                raise InvalidRequest(f"{name}: {_shown(value)} is not offered; {fix}", param=name)
        else:
            raise InvalidRequest(f"{_shown(name)}: unknown field; {_nearest(name, kind.model_fields)}", param=name[:100])
    return kept


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {found[0]!r}?" if found else "leave it out"


def _shown(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = 80
    return short.repr(value)


def _explain(errors: list[Any], hints: Mapping[str, str]) -> InvalidRequest:
    """The first of pydantic's errors in our words."""
    first = errors[0]
    if first["type"] == "value_error" and isinstance(first["ctx"]["error"], FieldRefusal):
        error: InvalidRequest = first["ctx"]["error"].error
        return error
    path = first["loc"]
    field, where = str(path[0]), _dotted(path)
    if first["type"] == "missing":
        return InvalidRequest(f"{where}: missing; it is required", param=where)
    if field in hints:
        return InvalidRequest(f"{field}: not valid; {hints[field]}", param=field)
    if "content" in path:
        where = _dotted(path[: path.index("content") + 1])
        return InvalidRequest(f"{where}: not valid; give a string or a list of text parts", param=where)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{where}: unknown field; leave it out", param=where)
    advice = first["msg"].replace("Input should be", "it should be")
    return InvalidRequest(f"{where}: {_shown(first['input'])} is not valid; {advice}", param=where)


def _dotted(path: Iterable[str | int]) -> str:
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out
