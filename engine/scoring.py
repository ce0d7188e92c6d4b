"""How likely ids were that are there already: log-probabilities from logits, a bounded piece of them at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonpool.core.errors import Bug
from moonpool.engine.prompt_scores import Scores

PIECE_VALUES = 1 << 22  # logits in float32 at once: 16 MiB


def score(logits: torch.Tensor, ids: Sequence[int], width: int) -> Scores:
    """``ids[i]`` under row i of ``logits`` ([ids, vocabulary], any floating type), with the ``width`` likeliest of each
    row. There is one row at least, and the vocabulary has ``width`` ids."""
    rows, vocabulary = logits.shape
    wanted = torch.tensor(ids, dtype=torch.int64)
    parts: list[tuple[torch.Tensor, ...]] = []
    for first in range(0, rows, step := max(PIECE_VALUES // vocabulary, 1)):
        piece = logits[first : first + step].float()
        own = piece.gather(1, wanted[first : first + step, None])
        norm = piece.logsumexp(dim=-1, keepdim=True)
        if not bool(torch.isfinite(norm).all()):
            raise Bug("logits are not finite: the model read memory that holds no K/V")
        top, top_ids = piece.topk(width, dim=-1)
        parts.append(((own - norm).squeeze(1), (piece > own).sum(dim=-1) + 1, top_ids, top - norm))
    logprobs, ranks, top_tokens, top_logprobs = (torch.cat(one).numpy() for one in zip(*parts, strict=True))
    return Scores(logprobs, ranks, top_tokens, top_logprobs)
