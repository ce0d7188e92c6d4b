"""A request as every room sees it: token ids in, sampling parameters, latency targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from moonpool.core.errors import Failure, InvalidRequest
from moonpool.core.ids import RequestId
from moonpool.core.use import Use


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or (gateway) a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"


class GuideKind(StrEnum):
    """What a ``Guide``'s text is."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer must look like: ids that would leave it are never drawn."""

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Added to the logit of ``token`` before anything else."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next id is drawn. Validated once, at the gateway. ``max_tokens`` of 0 draws none: only the prompt is computed.

    ``seed`` is always set (the gateway draws one), because a resumed attempt must draw the same numbers.
    ``logprobs`` is the number of most likely alternatives reported beside each sampled id; None reports none.
    ``prompt_logprobs`` says the same of the prompt's ids.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    min_p: float = 0.0  # of the likeliest id's probability; less likely ids are not drawn
    logit_bias: tuple[LogitBias, ...] = ()
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in milliseconds; None means the request carries none. A refusal needs a target."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank weights that are added to the model's. ``digest`` tells two apart on every host, whatever they are called."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``keys`` are the block keys of the whole blocks of ``prompt`` under ``namespace``."""

    id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    namespace: bytes  # 16 bytes: see core.blocks.namespace
    keys: tuple[bytes, ...]
    targets: Targets = field(default_factory=Targets)
    tenant: str = "default"
    turn: int = 1  # of its conversation, counting from 1: how often the client has come back
    kind: str = ""  # of traffic, as in ``core.use.Use``
    priority: int = 0  # larger is more urgent, among requests of its tenant
    weight: float = 1.0  # of its tenant, where tenants compete
    adapter: Adapter | None = None

    @property
    def adapter_digest(self) -> str:
        """Empty: the model alone."""
        return self.adapter.digest if self.adapter else ""

    @property
    def use(self) -> Use:
        return Use(tenant=self.tenant, kind=self.kind, turn=self.turn, prompt_tokens=len(self.prompt))


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another choice of the same prompt: an attempt at a request that differs from the first one in name and seed only."""

    id: RequestId
    number: int
    seed: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request. Only the gateway mints attempts; every cross-process effect carries (request id, number).

    ``emitted`` are the ids already streamed to the client: they are part of the context, never sampled again.
    ``deadline_ms`` is what was left of the request's total budget when this message was written. ``siblings`` begin with it:
    the prompt is computed once for all of them, and nobody's ids are known yet.
    """

    request: Request
    number: int
    emitted: tuple[int, ...] = ()
    deadline_ms: int = 120_000
    siblings: tuple[Sibling, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        return self.request.prompt + self.emitted

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives to report beside each id of the prompt; None: none of it is wanted, or it was told with the first id."""
        return None if self.emitted else self.request.sampling.prompt_logprobs

    def first_id_within_s(self, budget_ms: int) -> float:
        """Seconds from now on, where this was written just now and its request began with ``budget_ms``; below 0: it is late.

        Infinite where no target says so, or the request has its first id.
        """
        target_ms = self.request.targets.ttft_ms
        if target_ms is None or self.emitted:
            return inf
        return (target_ms - max(budget_ms - self.deadline_ms, 0)) / 1e3

    def of(self, sibling: Sibling) -> Attempt:
        """The attempt of ``sibling`` alone."""
        sampling = replace(self.request.sampling, seed=sibling.seed)
        request = replace(self.request, id=sibling.id, sampling=sampling)
        return replace(self, request=request, number=sibling.number, siblings=())


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled id; ``logprob`` and ``top`` are filled only where the request asked for logprobs."""

    token: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the ids of a prompt from position ``first`` on (1 at least), as many as one message carries.

    Of position ``first + i``: its own id's ``logprobs[i]`` and ``ranks[i]`` (1: the likeliest), and the ``width`` likeliest
    ids, ``top_tokens[i * width ..]`` with their ``top_logprobs``, likelier first. Flat, because there are thousands of them.
    """

    first: int
    width: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.logprobs)
        lengths = (len(self.ranks), len(self.top_tokens), len(self.top_logprobs))
        if lengths != (n, n * self.width, n * self.width):
            raise InvalidRequest(f"prompt log-probabilities: {n} of width {self.width} came with lists of {lengths}")


@dataclass(frozen=True, slots=True)
class Emission:
    """What one engine step says about one attempt: at most one new id, and how it ended if it did.

    ``position`` counts output ids from 0; the gateway accepts only (current attempt, next position).
    ``cached_tokens`` is the number of prompt tokens not computed anew; set with position 0 of an attempt.
    ``error`` ends the attempt. Emissions with ``prompt_logprobs`` say nothing else and come before the first id.
    """

    request: RequestId
    attempt: int
    position: int
    sampled: Sampled | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: Failure | None = None
    prompt_logprobs: PromptLogprobs | None = None
