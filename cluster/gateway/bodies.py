"""Request bodies of the OpenAI-compatible endpoints: the fields that mean something here, and their ranges."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar, cast

from pydantic import Field, StrictInt, model_validator

from moonpool.cluster.gateway.fields import Body, checked, refusal
from moonpool.cluster.gateway.structured import Structured
from moonpool.cluster.gateway.tools import ToolCall, ToolUse

MAX_PROMPTS = 4_096  # of one request; timing.queue_limit may allow less
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_CACHE_KEY_CHARS = 1_024
MOST_PRIORITY = 1 << 31
LEAST_TARGET_MS = 1e-3  # what is divided by a target has to stay a number
_UINT32 = (1 << 32) - 1

T = TypeVar("T")
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
Many = Annotated[list[T], Field(fail_fast=True)]  # one error is enough: a body may hold millions of wrong items
TokenId = Annotated[StrictInt, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="usage so far in every chunk; needs include_usage")
    include_obfuscation: bool = Field(False, description="accepted and ignored: chunks are never padded")


class Slo(Body):
    """Latency targets, for clients that cannot send headers. 0: none; left out: the default."""

    ttft_ms: float | None = Field(None, ge=0)
    tbt_ms: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _times(self) -> Self:
        for name in ("ttft_ms", "tbt_ms"):
            if 0 < (getattr(self, name) or 0.0) < LEAST_TARGET_MS:
                raise refusal(f"slo.{name}", f"{getattr(self, name)} is no time; give milliseconds, or 0 for no target")
        return self


class SamplingBody(Structured):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=_UINT32)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=_UINT32, description="0 and -1 keep all")
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: StopString | Many[StopString] | None = Field(None, description=f"at most {MAX_STOPS} strings")
    stop_token_ids: Many[TokenId] = Field([], max_length=64)
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
    cache_salt: str = Field("", min_length=1, max_length=MAX_SALT_CHARS, description="KV is shared with equal ones only")
    prompt_cache_key: str = Field(
        "", max_length=MAX_CACHE_KEY_CHARS, description="requests of one key come back alike: a hint to eviction"
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] = Field(
        "in_memory", description="24h: its blocks are used again after longer pauses: a hint to eviction"
    )
    priority: int = Field(
        0, ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="smaller is more urgent, among the tenant's own requests"
    )
    slo: Slo | None = Field(None, description="latency targets: ttft_ms and tbt_ms")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def turn(self) -> int:
        """Of its conversation, as far as the body shows it."""
        return 1

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
                raise refusal(name, f"{getattr(self, name)} choices per request are not offered yet; use 1")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "given without stream; set stream to true or leave stream_options out")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise refusal("stop", f"{len(self.stop)} strings; give at most {MAX_STOPS}")
        if self.wanted_tokens is not None and self.min_tokens > self.wanted_tokens:
            raise refusal(
                "min_tokens", f"{self.min_tokens} is above {self.tokens_field} {self.wanted_tokens}; make it no larger"
            )
        return self


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | Prompts[str] | Many[TokenId] | Prompts[Many[TokenId]]
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
            raise refusal("echo", "log-probabilities of the prompt are not offered; leave out logprobs or set echo to false")
        return self

    @model_validator(mode="after")
    def _some_prompt(self) -> Self:
        if not self.prompts or not all(self.prompts):
            raise refusal("prompt", "empty; give at least one token")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. Its text cannot end its turn: see ``moonpool.cluster.gateway.tokenizer``."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
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
        if self.tool_calls:
            seen["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                seen[name] = value
        return seen


class ChatBody(ToolUse, SamplingBody):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_UINT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def turn(self) -> int:
        return 1 + sum(message.role == "assistant" for message in self.messages)

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
            raise refusal("top_logprobs", "given without logprobs; set logprobs to true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise refusal("max_tokens", f"{both[0]} differs from max_completion_tokens {both[1]}; give one of them")
        return self


_HINTS = {
    "tool_choice": 'give none, auto, required, or {"type": "function", "function": {"name": NAME}}',
    "guided_json": "give a JSON schema, or its text",
    "prompt": f"give a string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or of such lists",
    "stop": f"give a non-empty string or a list of up to {MAX_STOPS} of them, each of at most {MAX_STOP_CHARS} characters",
}


def parse_completion(raw: bytes) -> CompletionBody:
    return checked(CompletionBody, raw, _HINTS)


def parse_chat(raw: bytes) -> ChatBody:
    return checked(ChatBody, raw, _HINTS)
