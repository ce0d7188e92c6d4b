"""How a generation is to be shown: by the endpoint that was asked, with what its body wants to see."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moonpool.cluster.gateway.bodies import CompletionBody, SamplingBody
from moonpool.cluster.gateway.detokenise import Detokeniser
from moonpool.cluster.gateway.generation import Generation, Run
from moonpool.cluster.gateway.scored_prompt import EchoedPrompt, offsets_in
from moonpool.cluster.gateway.served import Served
from moonpool.cluster.gateway.shapes import ChatShape, CompletionShape, Head, Shape

_UNSTATED_TOKENS = 256  # reserved for an answer whose length the client did not limit


def wanted_tokens(generation: Generation, body: SamplingBody) -> int:
    """Tokens to reserve: the prompts', and as many as the client allows each answer."""
    answer = _UNSTATED_TOKENS if body.wanted_tokens is None else body.wanted_tokens
    prompts = sum(len(run.ledger.request.prompt) for run in generation.prompts)
    return prompts + sum(min(run.ledger.request.sampling.max_tokens, answer) for run in generation.runs)


def shape_of(id: str, generation: Generation, model: Served, body: SamplingBody) -> Shape:
    shown = [run for run in generation.prompts for _ in range(generation.shown)]  # of each choice, the one with its prompt
    head = Head(
        id=id,
        model=body.model if body.model in model.adapters else model.name,
        created=int(time.time()),
        name_bytes=model.tokens.name_bytes,
        logprobs=body.alternatives is not None,
        prompt_ids=[run.ledger.request.prompt for run in shown] if body.return_token_ids else None,
        scored=[run.scored for run in shown if run.scored is not None],
        prompt_logprobs=body.prompt_logprobs,
    )
    if not isinstance(body, CompletionBody):
        return ChatShape(head)
    if not body.echo:
        return CompletionShape(head, echoed=None)
    prompts: Sequence[str | list[int]] = body.prompts
    echoed = [_echoed(prompt, run, model, body) for prompt, run in zip(prompts, generation.prompts, strict=True)]
    return CompletionShape(head, echoed=[one for one in echoed for _ in range(generation.shown)])


def _echoed(prompt: str | list[int], run: Run, model: Served, body: CompletionBody) -> EchoedPrompt:
    """As it was sent, or decoded from its ids where these were sent, or cut."""
    ids, tokens = run.ledger.request.prompt, model.tokens
    bytes_of = tokens.text_bytes if body.skip_special_tokens else tokens.name_bytes
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        text = prompt
    else:
        detokeniser = Detokeniser(bytes_of)
        text = "".join(map(detokeniser.push, ids)) + detokeniser.finish()
    if body.logprobs is None or run.scored is None:
        return EchoedPrompt(text)
    return EchoedPrompt(text, run.scored, body.logprobs, offsets_in(text, ids, bytes_of, tokens.name_bytes))
