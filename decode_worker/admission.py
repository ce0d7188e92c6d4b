"""Whether a decode worker can take an attempt at all. What fails here fails on every worker like this one."""

from __future__ import annotations

from moonpool.core.errors import ContextLength, InvalidRequest, LayoutMismatch
from moonpool.core.request import Attempt
from moonpool.engine.engine import Engine


def token_limit(engine: Engine) -> int:
    """Tokens at which a sequence ends whatever it asked for: the model's context, or all device pages of this worker."""
    return min(engine.max_context, engine.pages.total * engine.layout.block_tokens)


def check_attempt(attempt: Attempt, engine: Engine) -> None:
    """InvalidRequest, ContextLength or LayoutMismatch unless ``attempt`` can be computed with this engine."""
    request, size = attempt.request, engine.layout.block_tokens
    if not request.prompt:
        raise InvalidRequest("prompt: it has no tokens; send at least one", param="prompt")
    if max(attempt.context) >= engine.vocab_size:
        raise InvalidRequest(
            f"prompt: token id {max(attempt.context)} is out of range; the vocabulary has {engine.vocab_size} ids",
            param="prompt",
        )
    if len(request.keys) != len(request.prompt) // size:
        raise LayoutMismatch(
            f"a prompt of {len(request.prompt)} tokens came with {len(request.keys)} block keys, blocks of {size} tokens have "
            f"{len(request.prompt) // size}; start gateway and workers with the same engine.block_tokens"
        )
    engine.require_adapter(request.adapter)
    if attempt.siblings and attempt.emitted:
        raise InvalidRequest(f"siblings: {len(attempt.siblings)} begin with an attempt that has ids already; place them alone")
    if len(attempt.context) + min(request.sampling.max_tokens, 1) > token_limit(engine):
        raise ContextLength(
            f"prompt: {len(attempt.context)} tokens leave no room for an answer within {token_limit(engine)} tokens; "
            "shorten the prompt, or raise engine.pages where the model's context is longer",
            param="prompt",
        )
