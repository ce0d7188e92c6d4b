"""A prompt's ids with their log-probabilities: collected from their parts, and shown as OpenAI and as vLLM do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.cluster.gateway.detokenise import Detokeniser
from moonpool.core.request import PromptLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class Entry:
    """One id of a prompt: what it had, given those before it. ``rank`` 1 is the likeliest."""

    token: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


class ScoredPrompt:
    """All choices of the prompt share it; ``ready`` is set once all is there. A later attempt tells all of it again."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.ready = asyncio.Event()
        self._parts: list[PromptLogprobs] = []
        self._known = 1
        self._look()

    def take(self, part: PromptLogprobs) -> None:
        """The next part, or the first one once more. What follows on nothing is left out: its attempt is no more."""
        if self.ready.is_set():
            return
        if part.first == 1:
            self._parts, self._known = [], 1
        if part.first == self._known:
            self._parts.append(part)
            self._known += len(part.logprobs)
        self._look()

    def _look(self) -> None:
        if self._known >= len(self.ids):
            self.ready.set()

    def entries(self, width: int) -> Iterator[Entry | None]:
        """One for each id, with the ``width`` likeliest at most; None for the first."""
        yield None
        for part in self._parts:
            shown = min(width, part.width)
            for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
                here = slice(i * part.width, i * part.width + shown)
                top = map(TopLogprob, part.top_tokens[here], part.top_logprobs[here])
                yield Entry(self.ids[part.first + i], logprob, rank, tuple(top))


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """What an answer repeats of its prompt; with log-probabilities, ``width`` alternatives, and where the text of each id
    begins in ``text``."""

    text: str
    scored: ScoredPrompt | None = None
    width: int = 0
    offsets: Sequence[int] = ()


def offsets_in(text: str, ids: Sequence[int], bytes_of: Callable[[int], bytes], name_of: Callable[[int], bytes]) -> list[int]:
    """Where the text of each id begins in ``text``, the prompt they were made from. A special id has its name for text where
    that is what stands there, else none; where tokenising changed the text they are as near as can be told."""
    detokeniser, at, found = Detokeniser(bytes_of), 0, []
    for token in ids:
        found.append(min(at, len(text)))
        said = detokeniser.push(token)
        if not said and not bytes_of(token):
            name = name_of(token).decode(errors="replace")
            said = name if name and text.startswith(name, at) else ""
        at += len(said)
    return found


def as_vllm(scored: ScoredPrompt, width: int, text: Callable[[int], str], number: Callable[[float], float]) -> list[Any]:
    """``prompt_logprobs``: for each id null, or an object by id: its own first, then the likeliest ones."""
    out: list[Any] = []
    for entry in scored.entries(width):
        if entry is None:
            out.append(None)
            continue
        shown = {str(entry.token): {"logprob": number(entry.logprob), "rank": entry.rank, "decoded_token": text(entry.token)}}
        for rank, one in enumerate(entry.top, 1):
            value = {"logprob": number(one.logprob), "rank": rank, "decoded_token": text(one.token)}
            shown.setdefault(str(one.token), value)
        out.append(shown)
    return out
