"""Prompts of a request body to token ids and block keys: short ones at once, long ones in a thread of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moonpool.cluster.gateway.bodies import ChatBody, CompletionBody, SamplingBody
from moonpool.cluster.gateway.known_prompts import KnownPrompts
from moonpool.cluster.gateway.tokenizer import Tokenizer
from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import InvalidRequest
from moonpool.kvstore.fair_turns import FairTurns

HANDED_OVER = 2  # to the thread: the next one is there when it is done with one
INLINE_BYTES = 4_096  # of a body: about a millisecond of tokenising, no more than a hand-over to a thread costs under load


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    keys: tuple[bytes, ...]


class Prompts:
    """Two tokenizers, because one is not safe in two threads: the event loop's, and the thread's."""

    def __init__(self, tokenizer: Tokenizer, aside: Tokenizer, thread: ThreadPoolExecutor, *, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._aside = aside
        self._thread = thread
        self._known = KnownPrompts()
        self._turns = FairTurns(HANDED_OVER)

    @classmethod
    async def load(cls, model_dir: Path, *, vocab_size: int, tool_parser: str = "auto") -> Prompts:
        """``vocab_size``: ids below it are valid. Loading takes about two seconds, off the event loop."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="gateway-tokenizer")
        loop = asyncio.get_running_loop()
        try:
            load = partial(Tokenizer.load, model_dir, tool_parser=tool_parser)
            tokenizers = [await loop.run_in_executor(thread, load) for _ in range(2)]
        except BaseException:
            thread.shutdown()
            raise
        return cls(tokenizers[0], tokenizers[1], thread, vocab_size=vocab_size)

    async def of(self, body: SamplingBody, size: int, hasher: BlockHasher | None, tenant: str) -> list[Prompt]:
        """One entry per choice of a body of ``size`` bytes; without ``hasher`` there are no keys. Long ones go in turn by
        tenant."""
        if size <= INLINE_BYTES:
            return self._encode(self.tokenizer, body, hasher)
        loop = asyncio.get_running_loop()
        async with self._turns.turn(tenant, size):
            return await loop.run_in_executor(self._thread, self._encode, self._aside, body, hasher)

    def _encode(self, tokenizer: Tokenizer, body: SamplingBody, hasher: BlockHasher | None) -> list[Prompt]:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        return [self._prompt(ids, field, hasher) for ids in _ids(tokenizer, body)]

    def _prompt(self, ids: list[int], field: str, hasher: BlockHasher | None) -> Prompt:
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequest(
                f"{field}: token id {max(ids)} is out of range; this model's ids are 0 to {self.vocab_size - 1}", param=field
            )
        return Prompt(tuple(ids), tuple(self._known.keys(hasher, ids)) if hasher else ())

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _ids(tokenizer: Tokenizer, body: SamplingBody) -> list[list[int]]:
    kept = body.truncate_prompt_tokens
    return [ids if kept is None else ids[-kept:] for ids in _all_ids(tokenizer, body)]


def _all_ids(tokenizer: Tokenizer, body: SamplingBody) -> list[list[int]]:
    if isinstance(body, ChatBody):
        messages, tools = [m.for_template() for m in body.messages], [t.for_template() for t in body.tools]
        return [tokenizer.encode_chat(messages, tools, may_call=bool(body.callable))]
    if isinstance(body, CompletionBody):
        special = body.add_special_tokens
        return [tokenizer.encode(one, special=special) if isinstance(one, str) else one for one in body.prompts]
    raise TypeError(f"no prompt in {type(body).__name__}")
