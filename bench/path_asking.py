"""Asks a local cluster for streamed answers, and its processes for the instants of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio

from moonpool.bench.asking import greedy_body
from moonpool.bench.local_cluster import LocalCluster
from moonpool.bench.path_steps import SENT, TEXT, Mode, Point, Where
from moonpool.cluster.survey import members
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness
from moonpool.loadgen.client import Answer, HttpSender, open_session, served_model
from moonpool.loadgen.plan import PlannedSend
from moonpool.loadgen.prompts import Alphabet, PromptMaker, token_alphabet, word_alphabet
from moonpool.loadgen.record import Outcome
from moonpool.wire import pb
from moonpool.wire.channels import dial

_BLOCK = 64
_PROMPT = 128
_FIRST_OUTPUT = 4  # tokens of an answer of which only the first is looked at
_TOLD_S = 2.0  # for a process to remember a request that is over
_LOOK_S = 0.02
_WHERE: dict[Role, Where] = {
    Role.GATEWAY: "gateway",
    Role.CONDUCTOR: "conductor",
    Role.DECODE: "decode",
    Role.BOTH: "decode",
    Role.PREFILL: "prefill",
}
Kind = Literal["ids", "text"]


class Monotonic:
    """The clock of the processes' instants, to subtract the client's from theirs."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PathClient:
    def __init__(self, sender: HttpSender, model: str, words: Alphabet, faces: dict[Where, grpc.aio.Channel]) -> None:
        self._sender, self._model, self._faces = sender, model, faces
        self._prompts: dict[Kind, PromptMaker] = {"ids": PromptMaker(token_alphabet()), "text": PromptMaker(words)}

    @classmethod
    @asynccontextmanager
    async def open(cls, cluster: LocalCluster, mode: Mode, model_dir: Path) -> AsyncIterator[PathClient]:
        live = [c.member for c in await members(cluster.registry) if c.liveness is Liveness.LIVE and c.member.role in _WHERE]
        faces = {_WHERE[member.role]: dial(member.address) for member in live}
        words = word_alphabet(model_dir)
        try:
            async with open_session(cluster.url, timeout_s=120) as session:
                sender = HttpSender(session, Monotonic())
                yield cls(sender, await served_model(session, cluster.url), words, faces)
        finally:
            for channel in faces.values():
                await channel.close()

    async def ask(self, prompt: int, output: int, tokens: int = _PROMPT, kind: Kind = "ids") -> Answer:
        """An answer of ``output`` tokens to the prompt with that number. ConfigError: not answered in full."""
        blocks = tuple(range(prompt * 1_000, prompt * 1_000 + -(-tokens // _BLOCK)))
        content = self._prompts[kind].json_prompt(PlannedSend(0, 0.0, tokens, output, blocks, _BLOCK, 0, 0))
        answer = Answer()
        await self._sender.send(greedy_body(self._model, output, content), {}, answer)
        if answer.outcome is not Outcome.OK or answer.reading.completion_tokens != output:
            told = f"{answer.status}, {answer.reading.completion_tokens} tokens: {answer.reason}"
            raise ConfigError(f"bench: asked for {output} tokens, the server answered {told}", param="bench")
        return answer

    async def life_of(self, kind: Kind, tokens: int) -> dict[Point, float]:
        """Every instant of one request for the prompt of that kind and length."""
        answer = await self.ask(tokens if kind == "ids" else tokens + 1, _FIRST_OUTPUT, tokens, kind)
        if answer.sent is None or answer.reading.first_text is None:
            raise ConfigError("bench: the server sent no text", param="bench")
        points: dict[Point, float] = {("client", SENT): answer.sent, ("client", TEXT): answer.reading.first_text}
        for where, channel in self._faces.items():
            points |= {(where, name): at for name, at in (await _life(channel, answer.request_id)).items()}
        return points


async def _life(channel: grpc.aio.Channel, request: str) -> dict[str, float]:
    """What a process remembers of ``request``; nothing where it never does."""
    asked, end = pb.admin.LivesRequest(request=request), time.monotonic() + _TOLD_S
    while time.monotonic() < end:
        reply = await pb.admin_rpc.AdminStub(channel).Lives(asked, timeout=_TOLD_S)
        if lives := json.loads(reply.json):
            instants: dict[str, float] = lives[-1][2]
            return instants
        await asyncio.sleep(_LOOK_S)
    return {}
