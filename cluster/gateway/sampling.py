"""How the choices of a request are drawn, from what its body says. Pure but for the seed of a body without one."""

from __future__ import annotations

import secrets
from dataclasses import replace

from moonpool.cluster.gateway.bodies import SamplingBody
from moonpool.core.errors import InvalidRequest
from moonpool.core.request import Guide, Request, SamplingParams

_SEEDS = 1 << 64


def sampling_of(body: SamplingBody, max_tokens: int, guide: Guide | None, vocab_size: int) -> SamplingParams:
    """InvalidRequest where an id is none of the model's."""
    for field, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", [one.token for one in body.biases])):
        if (worst := max(ids, default=0)) >= vocab_size:
            raise InvalidRequest(f"{field}: {worst} is out of range; this model's ids are 0 to {vocab_size - 1}", param=field)
    alternatives = body.alternatives
    if alternatives is None and body.drawn > body.n:
        alternatives = 0  # the best are known by their own
    scored = body.prompt_alternatives
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=secrets.randbits(63) if body.seed is None else body.seed % _SEEDS,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logprobs=alternatives,
        min_p=body.min_p,
        logit_bias=body.biases,
        prompt_logprobs=None if scored is None else min(scored, vocab_size),
        guide=guide,
    )


def seeded(request: Request, choice: int) -> Request:
    """``request`` as choice ``choice`` of its prompt: drawn as a request of its own with a seed larger by that would be."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + choice) % _SEEDS)
    return replace(request, sampling=sampling)
