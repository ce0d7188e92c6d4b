"""The models behind this gateway: each with its tokenizer, its group of the cluster's members, and the way in to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from moonpool.cluster.gateway.conductors import Conductors
from moonpool.cluster.gateway.decode_client import DecodeStreams
from moonpool.cluster.gateway.facts import read_facts
from moonpool.cluster.gateway.guiding import Guiding
from moonpool.cluster.gateway.intake import Intake
from moonpool.cluster.gateway.prompts import Prompts
from moonpool.cluster.gateway.roster import Roster
from moonpool.cluster.gateway.tenants.caller import ANYBODY, Caller
from moonpool.cluster.gateway.tokenizer import TokenTable
from moonpool.cluster.groups import Group
from moonpool.cluster.models import local_model
from moonpool.core.config import Config
from moonpool.core.errors import UnknownModel
from moonpool.core.ids import Role
from moonpool.core.membership import Peers
from moonpool.core.request import Adapter
from moonpool.engine.checkpoint import adapter_digest, default_cache
from moonpool.engine.guides import Guides

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Served:
    """One model. Every other one may fail, and this one knows nothing of it."""

    name: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]  # names under which an adapter of it answers
    prompts: Prompts
    guiding: Guiding
    roster: Roster
    conductors: Conductors
    intake: Intake

    @classmethod
    async def load(cls, config: Config, model_dir: Path, peers: Peers, streams: DecodeStreams, hash_key: bytes) -> Served:
        """The model of ``config``'s [model]. ConfigError where its directory lacks what a gateway needs."""
        facts = read_facts(model_dir, max_context=config.model.max_context)
        prompts = await Prompts.load(model_dir, vocab_size=facts.vocab_size, tool_parser=config.model.tool_parser)
        guiding = Guiding(Guides(model_dir, facts.vocab_size, facts.eos_ids), prompts.tokenizer)
        group = Group(peers, config.model_name)
        roster, conductors = Roster(group, hash_key, facts.max_context), Conductors(group, config.timing)
        adapters = await asyncio.to_thread(_adapters, config)
        intake = Intake(config, prompts, guiding, roster, conductors, streams, adapters)
        return cls(config.model_name, config.model.aliases, tuple(adapters), prompts, guiding, roster, conductors, intake)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases, *self.adapters)

    @property
    def tokens(self) -> TokenTable:
        return self.prompts.tokenizer.tokens

    async def close(self) -> None:
        await self.conductors.close()
        self.prompts.close()
        self.guiding.close()


def _adapters(config: Config) -> dict[str, Adapter]:
    """By name. ConfigError where files are missing; what is in them is for workers to judge."""
    named = config.model.adapters.items()
    return {name: Adapter(name, adapter_digest(name, Path(place).expanduser(), default_cache())) for name, place in named}


class Models:
    """In the order of the configuration; every name and alias leads to one of them."""

    def __init__(self, all: Sequence[Served]) -> None:
        self.all = tuple(all)
        self._by_name = {name: one for one in all for name in one.names}

    @classmethod
    async def load(cls, config: Config, model_dir: Path, peers: Peers, streams: DecodeStreams, hash_key: bytes) -> Models:
        """That of [model], which lies in ``model_dir``, and those of gateway.models."""
        found: list[Served] = []
        try:
            for model in config.models:
                own = config.model_copy(update={"model": model})
                directory = await asyncio.to_thread(local_model, model.path, _log.info) if found else model_dir
                found.append(await Served.load(own, directory, peers, streams, hash_key))
        except BaseException:
            await cls(found).close()
            raise
        return cls(found)

    def of(self, caller: Caller) -> list[Served]:
        """Those that ``caller`` may use."""
        return [one for one in self.all if caller.may_use(one.name)]

    def named(self, name: str) -> Served | None:
        return self._by_name.get(name)

    def find(self, name: str, caller: Caller = ANYBODY) -> Served:
        """UnknownModel, naming those that there are for ``caller``."""
        found = self._by_name.get(name)
        if found is None or not caller.may_use(found.name):
            names = [repr(name) for one in self.of(caller) for name in (one.name, *one.adapters)]
            offered = ", ".join(names) or "none: this key may use no model"
            raise UnknownModel(f"model: {name[:100]!r} is not served here; use {offered}", param="model")
        return found

    def missing(self) -> list[Role]:
        """Empty as soon as one model has a whole path from prompt to tokens; else what the first one lacks."""
        lacking = [one.roster.missing() for one in self.all]
        return [] if not all(lacking) else lacking[0]

    def lacking(self) -> list[Served]:
        """Those without such a path."""
        return [one for one in self.all if one.roster.missing()]

    async def close(self) -> None:
        for one in self.all:
            await one.close()
