"""Request bodies of the OpenAI-compatible endpoints: the fields that mean something here, and their ranges."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar, cast

from pydantic import Field, StrictInt, model_validator

from moonpool.cluster.gateway.fields import Body, checked, refusal
from moonpool.cluster.gateway.structured import Structured
from moonpool.cluster.gateway.tools import ToolCall, ToolUse
from moonpool.core.request import LogitBias

MAX_PROMPTS = 4_096  # of one request; timing.queue_limit may allow less
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_CACHE_KEY_CHARS = 1_024
MOST_PRIORITY = 1 << 31
MAX_BIASES = 1_024
LEAST_TARGET_MS = 1e-3  # what is divided by a target has to stay a number
_UINT32 = (1 << 32) - 1

T = TypeVar("T")
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
Many = Annotated[list[T], Field(fail_fast=True)]  # one error is enough: a body may hold millions of wrong items
TokenId = Annotated[StrictInt, Field(ge=0, le=_UINT32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
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
    min_p: float = Field(0.0, ge=0, le=1, description="of the likeliest id's probability: less likely ids are not drawn")
    logit_bias: dict[str, Bias] = Field({}, max_length=MAX_BIASES, description="id -> what is added to its logit")
    n: int = Field(1, ge=1, description="choices of each prompt, which is computed once; timing.queue_limit bounds them")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="of the prompt's ids; not with stream")
    include_stop_str_in_output: bool = Field(False, description="what ended the answer is part of its text")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=_UINT32, description="keep the last so many of a prompt's")
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

    @property
    def prompt_alternatives(self) -> int | None:
        """The same of the prompt's ids: as many as anything that shows them wants."""
        return self.prompt_logprobs

    @property
    def drawn(self) -> int:
        """Choices to generate of each prompt: ``n`` of them are shown."""
        return self.n

    @property
    def biases(self) -> tuple[LogitBias, ...]:
        return tuple(LogitBias(int(token), bias) for token, bias in self.logit_bias.items() if bias)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        ids = [int(name) if _is_id(name) else -1 for name in self.logit_bias]
        if -1 in ids or len(set(ids)) < len(ids):
            raise refusal("logit_bias", f"{list(self.logit_bias)[:8]} are not all ids, each once; use ids as names")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("prompt_logprobs", "not offered in streams; set stream to false, or use echo with logprobs")
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
    max_tokens: int | None = Field(None, ge=0, le=_UINT32, description="0 with echo or prompt_logprobs only")
    best_of: int | None = Field(None, ge=1, description="choices to draw n from: those with the best mean log-probability")
    add_special_tokens: bool = Field(True, description="false: a string's ids are those of its text alone")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((n for n in wanted if n is not None), default=None)

    @property
    def drawn(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each gives ``n`` choices of the answer."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[list[int]]", prompt)

    @model_validator(mode="after")
    def _scoring(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refusal("max_tokens", "0 asks for nothing; use 1 or more, or set echo")
        return self

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise refusal("best_of", f"{self.best_of} is below n {self.n}; make it no smaller")
        if self.drawn > self.n and self.stream:
            raise refusal("best_of", f"{self.best_of} is above n {self.n}, and a stream shows all; set stream to false")
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


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= len(str(_UINT32))


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
