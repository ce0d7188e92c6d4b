"""How much fits: the one place that decides an output length or refuses a prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.core.errors import ContextLength, InvalidRequest, PromptTooLarge

MOST_SCORES = 1 << 19  # log-probabilities of prompts in one answer: some 200 MB while it is written


@dataclass(frozen=True, slots=True)
class Limits:
    """``context``: tokens of prompt and output together. ``prompt``: what the largest prefill worker holds at once."""

    context: int
    prompt: int


def output_tokens(
    limits: Limits, prompt_tokens: int, wanted: int | None, *, default: int | None, prompt_field: str, tokens_field: str
) -> int:
    """Output tokens of a request that asks for ``wanted``; without it ``default``, or all the room there is.

    Nothing asked for is ever shortened: what does not fit is a ContextLength that names all three numbers.
    """
    room = limits.context - prompt_tokens
    asked = wanted if wanted is not None else 1
    if asked > room:
        fix = f"use {tokens_field} of at most {room}" if room > 0 else f"shorten {prompt_field}"
        raise ContextLength(
            f"{prompt_field if room < 1 else tokens_field}: this model's maximum context length is {limits.context} tokens: "
            f"the prompt has {prompt_tokens} and {asked} are requested ({prompt_tokens + asked} in all); {fix}",
            param=prompt_field if room < 1 else tokens_field,
        )
    if prompt_tokens > limits.prompt:
        raise PromptTooLarge(
            f"{prompt_field}: the prompt has {prompt_tokens} tokens and the largest prefill worker holds {limits.prompt}; "
            f"shorten {prompt_field} or give prefill workers more pages",
            param=prompt_field,
        )
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)


def require_few_scores(prompts: Iterable[int], alternatives: int, choices: int, field: str) -> None:
    """InvalidRequest naming ``field`` where an answer would have too many of them.

    ``prompts``: their tokens. Each prompt is shown with all its ``choices``.
    """
    scores = sum(prompts) * (alternatives + 1) * choices
    if scores > MOST_SCORES:
        raise InvalidRequest(
            f"{field}: {scores} log-probabilities of prompts in one answer; ask for at most {MOST_SCORES}: fewer alternatives, "
            "choices or prompts, or shorter ones",
            param=field,
        )
