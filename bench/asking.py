"""Asks a served model for streamed answers to numbered prompts, and times them as a client does."""

from __future__ import annotations

import json

from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import Answer, HttpSender
from moonpool.loadgen.plan import PlannedSend
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import Outcome

BLOCK = 64


class AskingClient:
    """Streams completions of numbered prompts, each of whole blocks of random words; equal numbers share their prefix."""

    def __init__(self, sender: HttpSender, model: str) -> None:
        self._sender = sender
        self._model = model
        self._prompts = PromptMaker(token_alphabet(), salt=7)

    async def ask(self, prompt: int, tokens: int, output: int) -> Answer:
        """One streamed answer to the prompt with that number. ConfigError: the server did not answer in full."""
        blocks = -(-tokens // BLOCK)
        ids = tuple(range(prompt * 1_000, prompt * 1_000 + blocks))
        content = self._prompts.json_prompt(PlannedSend(0, 0.0, tokens, output, ids, BLOCK, 0, 0))
        answer = Answer()
        await self._sender.send(greedy_body(self._model, output, content), {}, answer)
        if answer.outcome is not Outcome.OK:
            raise ConfigError(f"bench: the server answered {answer.status}: {answer.reason}", param="bench")
        if answer.reading.prompt_tokens != tokens or answer.reading.completion_tokens != output:
            counted = (answer.reading.prompt_tokens, answer.reading.completion_tokens)
            raise ConfigError(f"bench: asked for ({tokens}, {output}) tokens, the server counted {counted}", param="bench")
        return answer


def greedy_body(model: str, output: int, prompt: bytes) -> bytes:
    """Of a streamed completion of exactly ``output`` tokens. ``prompt``: JSON."""
    rest = {
        "model": model, "max_tokens": output, "min_tokens": output, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(rest).encode()[:-1] + b',"prompt":' + prompt + b"}"


def ttft_ms(answer: Answer) -> float:
    """From sending the request to the first text."""
    if answer.sent is None or answer.reading.first_text is None:
        raise ConfigError("bench: the server sent no text", param="bench")
    return (answer.reading.first_text - answer.sent) * 1e3
