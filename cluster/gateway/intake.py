"""From a request body to the runs that will answer it, or to the error that says what does not fit."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moonpool.cluster.gateway.attempts import AttemptEnded, Attempts
from moonpool.cluster.gateway.bodies import LEAST_TARGET_MS, ChatBody, SamplingBody, Slo
from moonpool.cluster.gateway.choice import Choice
from moonpool.cluster.gateway.conductors import RETRY_AFTER_S, Conductors
from moonpool.cluster.gateway.decode_client import DecodeStreams
from moonpool.cluster.gateway.detokenise import Detokeniser
from moonpool.cluster.gateway.generation import Generation, Run
from moonpool.cluster.gateway.guiding import Guiding
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.cluster.gateway.limits import output_tokens, require_few_scores
from moonpool.cluster.gateway.opening import Family, Opener
from moonpool.cluster.gateway.prompts import Prompt, Prompts
from moonpool.cluster.gateway.roster import Roster
from moonpool.cluster.gateway.sampling import sampling_of, seeded
from moonpool.cluster.gateway.scored_prompt import ScoredPrompt
from moonpool.cluster.gateway.tenants.caller import MOST_URGENT, Caller
from moonpool.core.config import Config
from moonpool.core.errors import InvalidRequest, NoPath
from moonpool.core.ids import RequestId
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.request import Adapter, Request, Targets

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat may fill the context
TTFT_HEADER = "x-ttft-target-ms"
TBT_HEADER = "x-tbt-target-ms"
DEADLINE_HEADER = "x-deadline-ms"
PRIORITY_HEADER = "x-moonpool-priority"
KIND_HEADER = "x-moonpool-kind"
MAX_KIND_CHARS = 64
KIND_BYTES = 8


class Intake:
    def __init__(
        self,
        config: Config,
        prompts: Prompts,
        guiding: Guiding,
        roster: Roster,
        conductors: Conductors,
        streams: DecodeStreams,
        adapters: Mapping[str, Adapter],
    ) -> None:
        """``adapters`` by the name that a request asks for as its model."""
        self._config = config
        self._prompts = prompts
        self._guiding = guiding
        self._roster = roster
        self._conductors = conductors
        self._streams = streams
        self._adapters = adapters
        self._now = asyncio.get_running_loop().time

    async def generation(
        self, id: str, body: SamplingBody, size: int, headers: Mapping[str, str], lifetime: Lifetime, caller: Caller
    ) -> Generation:
        """The runs of one HTTP request, not yet started.

        ``id`` names it, several choices get numbered names; ``size`` is its body's, in bytes.
        """
        targets, budget_ms = self._targets(headers, body.slo or Slo(), caller), self._budget_ms(headers)
        priority, kind = _priority(headers, body, caller), _kind(headers, body)
        adapter = self._adapters.get(body.model)
        named = self._roster.hasher(caller, body.cache_salt, adapter)
        guide = await self._guiding.of(body, caller.tenant)
        prompts = await self._prompts.of(body, size, named[0] if named else None, caller.tenant)
        lifetime.stamp(Instant.TOKENISED, self._now())
        if (alternatives := body.prompt_alternatives) is not None:
            field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            require_few_scores((len(prompt.ids) for prompt in prompts), alternatives, body.n, field)
        size_of, length = self._prompts.vocab_size, self._output_tokens
        params = [sampling_of(body, length(body, prompt), guide, size_of) for prompt in prompts]
        if named is None:
            raise self._no_path()
        runs: list[Run] = []
        for prompt, sampling in zip(prompts, params, strict=True):
            request = Request(
                RequestId(id),
                prompt.ids,
                sampling,
                named[1],
                prompt.keys,
                targets,
                caller.tenant,
                body.turn,
                kind,
                priority,
                caller.weight,
                adapter,
            )
            choices = [seeded(request, choice) for choice in range(body.drawn)]
            if len(prompts) * body.drawn > 1:
                choices = [replace(one, id=RequestId(f"{id}-{index}")) for index, one in enumerate(choices, len(runs))]
            runs += self._choices(choices, body, lifetime, budget_ms)
        return Generation(runs, self._now, shown=body.n)

    def _no_path(self) -> NoPath:
        missing = tuple(role.value for role in self._roster.missing()) or ("worker",)
        return NoPath(
            f"cluster: no live {', '.join(missing)} of model {self._config.model_name!r}; start one, or try again later",
            retry_after_s=RETRY_AFTER_S,
            missing=missing,
        )

    def _targets(self, headers: Mapping[str, str], slo: Slo, caller: Caller) -> Targets:
        """As the headers say, else the body, the tenant, the model, the gateway."""
        model, gateway = self._config.model, self._config.gateway
        ttft = caller.ttft_target_ms or model.ttft_target_ms or gateway.ttft_target_ms
        tbt = caller.tbt_target_ms or model.tbt_target_ms or gateway.tbt_target_ms
        ttft = ttft if slo.ttft_ms is None else slo.ttft_ms
        tbt = tbt if slo.tbt_ms is None else slo.tbt_ms
        return Targets(ttft_ms=_target(headers, TTFT_HEADER, ttft), tbt_ms=_target(headers, TBT_HEADER, tbt))

    def _output_tokens(self, body: SamplingBody, prompt: Prompt) -> int:
        chat = isinstance(body, ChatBody)
        length = output_tokens(
            self._roster.limits(),
            len(prompt.ids),
            body.wanted_tokens,
            default=None if chat else DEFAULT_COMPLETION_TOKENS,
            prompt_field="messages" if chat else "prompt",
            tokens_field=body.tokens_field,
        )
        if body.min_tokens > length:
            raise InvalidRequest(
                f"min_tokens: {body.min_tokens} is above the {length} output tokens of this request; lower it, or set "
                f"{body.tokens_field}",
                param="min_tokens",
            )
        return length

    def _budget_ms(self, headers: Mapping[str, str]) -> int:
        """A client may give its request less time than everybody has, never more."""
        most = self._config.timing.request_budget_ms
        wanted = _target(headers, DEADLINE_HEADER, 0.0, "timing.request_budget_ms")
        return most if wanted is None else min(most, max(1, round(wanted)))

    def _choices(self, requests: Sequence[Request], body: SamplingBody, lifetime: Lifetime, budget_ms: int) -> list[Run]:
        """Of one prompt, which the first one brings for all of them."""
        ledgers = [self._ledger(request, lifetime, budget_ms) for request in requests]
        family = Family(Opener(self._conductors, self._streams), ledgers) if len(ledgers) > 1 else None
        wanted = requests[0].sampling.prompt_logprobs is not None
        scored = ScoredPrompt(requests[0].prompt) if wanted else None
        return [self._run(one, body, Lifetime(dict(lifetime.at)), family, scored, first=one is ledgers[0]) for one in ledgers]

    def _ledger(self, request: Request, lifetime: Lifetime, budget_ms: int) -> Ledger:
        timing = self._config.timing
        return Ledger(
            request,
            started=lifetime.at[Instant.ARRIVED],
            budget_ms=budget_ms,
            max_attempts=timing.max_attempts,
            life_of=self._roster.life_of,
            hasher=self._roster.hasher_of(request.namespace),
            path_wait_ms=timing.path_wait_ms,
        )

    def _run(
        self,
        ledger: Ledger,
        body: SamplingBody,
        lifetime: Lifetime,
        family: Family | None,
        scored: ScoredPrompt | None,
        *,
        first: bool,
    ) -> Run:
        bytes_of = self._guiding.bytes_of(body) if body.skip_special_tokens else self._prompts.tokenizer.tokens.name_bytes
        choice = Choice(
            Detokeniser(bytes_of, ledger.request.prompt),
            stops=body.stops,
            min_tokens=body.min_tokens,
            include_stop=body.include_stop_str_in_output,
            parser=self._guiding.parser(body),
        )
        conductors = self._conductors

        def judge(end: AttemptEnded) -> None:
            conductors.ended(end.placement, end.reason, end.peer)

        attempts = Attempts(ledger, lifetime, conductors, self._streams, on_ended=judge, family=family)
        return Run(ledger, choice, lifetime, attempts, first=first, scored=scored)


def _target(headers: Mapping[str, str], name: str, default: float, zero: str = "no target") -> float | None:
    """Milliseconds from a header, else from the configuration; 0 means none."""
    raw = headers.get(name)
    try:
        value = default if raw is None else float(raw)
    except ValueError:
        value = math.nan
    if not (value == 0 or LEAST_TARGET_MS <= value < math.inf):
        raise InvalidRequest(f"{name}: {raw!r} is not a time; give milliseconds, or 0 for {zero}", param=name)
    return value or None


def _priority(headers: Mapping[str, str], body: SamplingBody, caller: Caller) -> int:
    """What the request claims, as far as its key allows; 0, or less where the key says so, if it claims nothing.

    The body's field is vLLM's, where the smallest goes first.
    """
    raw = headers.get(PRIORITY_HEADER, str(-body.priority))
    try:
        return max(-MOST_URGENT, min(int(raw), caller.priority))
    except ValueError:
        raise InvalidRequest(
            f"{PRIORITY_HEADER}: {raw[:40]!r} is not a whole number; give one up to {caller.priority}", param=PRIORITY_HEADER
        ) from None


def _kind(headers: Mapping[str, str], body: SamplingBody) -> str:
    """A class of requests that come back alike; eviction learns from it, and nothing else hears of it."""
    raw = headers.get(KIND_HEADER)
    if raw is None:
        key = body.prompt_cache_key.encode(errors="surrogatepass")
        named = hashlib.blake2b(key, digest_size=KIND_BYTES).hexdigest() if key else ""
        return f"{named}+24h" if body.prompt_cache_retention == "24h" else named
    if len(raw) > MAX_KIND_CHARS or not (raw.isascii() and raw.isprintable()):
        raise InvalidRequest(
            f"{KIND_HEADER}: {raw[:40]!r} names no kind of traffic; use up to {MAX_KIND_CHARS} printable ASCII characters",
            param=KIND_HEADER,
        )
    return raw
