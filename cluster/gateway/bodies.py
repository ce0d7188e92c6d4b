"""Request bodies of the OpenAI-compatible endpoints: what is accepted, and an error that names field, value and fix.

Three kinds of field beside those declared below:

* harmless ones of OpenAI's API are accepted and ignored (``IGNORED``);
* ones that would change the answer are accepted at the value that changes nothing (``NEUTRAL``) and refused otherwise;
* anything else is an error that offers the nearest known name. ``null`` means absent everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from moonpool.core.errors import InvalidRequest

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",  # of the client's own books; ours is in the response header
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "frequency_penalty_decay": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGPROBS = 20
_UINT32 = (1 << 32) - 1

B = TypeVar("B", bound="SamplingBody")

TokenId = Annotated[StrictInt, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="usage so far in every chunk; needs include_usage")
    include_obfuscation: bool = Field(False, description="accepted and ignored: chunks are never padded")


class SamplingBody(_Body):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=_UINT32)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=_UINT32, description="0 and -1 keep all")
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: StopString | list[StopString] | None = Field(None, description=f"at most {MAX_STOPS} strings")
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=_UINT32)
    n: int = Field(1, ge=1, description="1; more is not offered yet")
    best_of: int = Field(1, ge=1, description="1; more is not offered yet")
    return_token_ids: bool = Field(
        False, description="sampled ids beside the text, as token_ids; prompt_token_ids if not streamed"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def tokens_field(self) -> str:
        """The field that ``wanted_tokens`` came from."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report beside each id; None: no log-probabilities at all."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("n", "best_of"):
            if getattr(self, name) > 1:
                raise _refusal(name, f"{getattr(self, name)} choices per request are not offered yet; use 1")
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "given without stream; set stream to true or leave stream_options out")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise _refusal("stop", f"{len(self.stop)} strings; give at most {MAX_STOPS}")
        if self.wanted_tokens is not None and self.min_tokens > self.wanted_tokens:
            raise _refusal(
                "min_tokens", f"{self.min_tokens} is above {self.tokens_field} {self.wanted_tokens}; make it no larger"
            )
        return self


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per choice of the answer."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[list[int]]", prompt)

    @model_validator(mode="after")
    def _echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise _refusal("echo", "log-probabilities of the prompt are not offered; leave out logprobs or set echo to false")
        return self

    @model_validator(mode="after")
    def _some_prompt(self) -> Self:
        if not self.prompts or not all(self.prompts):
            raise _refusal("prompt", "empty; give at least one token")
        return self


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation. Its text cannot end its turn: see ``moonpool.cluster.gateway.tokenizer``."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """Text parts are joined by line ends."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, object]:
        """What the chat template sees. A developer is a system by another name."""
        role = "system" if self.role == "developer" else self.role
        seen: dict[str, object] = {"role": role, "content": self.text}
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                seen[name] = value
        return seen


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_UINT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refusal("top_logprobs", "given without logprobs; set logprobs to true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise _refusal("max_tokens", f"{both[0]} differs from max_completion_tokens {both[1]}; give one of them")
        return self


class _Refusal(ValueError):
    """Carries our own exception through pydantic."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(error.message)
        self.error = error


def _refusal(field: str, text: str) -> _Refusal:
    return _Refusal(InvalidRequest(f"{field}: {text}", param=field))


def parse_completion(raw: bytes) -> CompletionBody:
    return _checked(CompletionBody, raw)


def parse_chat(raw: bytes) -> ChatBody:
    return _checked(ChatBody, raw)


def _checked(kind: type[B], raw: bytes) -> B:
    fields = _known(kind, _load(raw))
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        raise _explain(e.errors(include_url=False)) from None


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
    found = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {found[0]!r}?" if found else "leave it out"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_UNIONS = {
    "prompt": "give a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": f"give a non-empty string or a list of up to {MAX_STOPS} of them, each of at most {MAX_STOP_CHARS} characters",
}


def _explain(errors: list[Any]) -> InvalidRequest:
    """The first of pydantic's errors in our words."""
    first = errors[0]
    if first["type"] == "value_error" and isinstance(first["ctx"]["error"], _Refusal):
        error: InvalidRequest = first["ctx"]["error"].error
        return error
    path = first["loc"]
    field, where = str(path[0]), _dotted(path)
    if first["type"] == "missing":
        return InvalidRequest(f"{where}: missing; it is required", param=where)
    if field in _UNIONS:
        return InvalidRequest(f"{field}: not valid; {_UNIONS[field]}", param=field)
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
