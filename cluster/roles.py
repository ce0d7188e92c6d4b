"""From a role to its started service: what each one loads, imported only where it runs.

Importing and loading hold up whatever thread does them for seconds: not the event loop, which has to hear a stop meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.cluster.gateway.tenants.file import pool_quotas
from moonpool.cluster.leaving import landings_ended, workers_gone
from moonpool.cluster.membership import Membership
from moonpool.cluster.models import kv_layout, local_model
from moonpool.cluster.process import Made, Say
from moonpool.cluster.sharing import decided, own_threads, turns
from moonpool.cluster.spec import RoleSpec
from moonpool.core.blocks import key_id, load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import Bug
from moonpool.core.ids import Role
from moonpool.core.membership import Member, Peers, Service
from moonpool.core.sizes import sized
from moonpool.kvstore.library.objects import RAW_LAYOUTS
from moonpool.kvstore.sealing.keys import kv_keys

if TYPE_CHECKING:
    from moonpool.cluster.gateway.service import Gateway
    from moonpool.engine.engine import Engine
    from moonpool.kvstore.node import StoreNode

PROGRESS_S = 1.0

StartWorker = Callable[[Config, "Engine", Member, Peers], Awaitable[Service]]


async def make(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    """Loads and starts the service of ``spec.role``. MoonpoolError where configuration or machine do not allow it."""
    spec = await asyncio.to_thread(_with_model_here, spec, say)
    config = spec.config
    hash_key = load_hash_key(Path(config.cluster.key_file))
    keys = kv_keys(config, Path.home())
    kv_key_id = "" if keys is None else keys.current.id
    member = replace(member, model=config.model_name, hash_key_id=key_id(hash_key), kv_key_id=kv_key_id)
    match spec.role:
        case Role.STORE:
            return await _store(spec, member, peers, say)
        case Role.CONDUCTOR:
            from moonpool.cluster.conductor import ConductorService
            from moonpool.cluster.leadership import Leadership

            return Made(await ConductorService.start(config, member, peers, Leadership(peers, config.timing)), member)
        case Role.GATEWAY:
            gateway = await (await asyncio.to_thread(_gateway_class)).start(config, member, peers, hash_key, spec.model_dir)
            several = len(config.models) > 1
            details = {"url": gateway.url} | ({"models": ", ".join(m.served_name for m in config.models)} if several else {})
            return Made(gateway, replace(member, model="" if several else member.model, details=details))
        case Role.PREFILL | Role.DECODE | Role.BOTH:
            return await _worker(spec, member, peers, say)


def _with_model_here(spec: RoleSpec, say: Say) -> RoleSpec:
    """``model_dir`` as this host has it: whoever planned this process may have known a further model by its path only."""
    path = spec.config.model.path
    if not path or spec.role in (Role.CONDUCTOR, Role.GATEWAY) or (spec.model_dir / "config.json").is_file():
        return spec
    return replace(spec, model_dir=local_model(path, say))


async def _store(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    if spec.config.model.path:
        layout = await asyncio.to_thread(kv_layout, spec.config, spec.model_dir)
        member = replace(member, layout=layout)
    else:  # it knows no model: layouts appear with their first users
        layout = RAW_LAYOUTS[-1]
    store = await asyncio.to_thread(_store_class)

    config = with_tenant_quotas(spec.config)

    async def start(member: Member) -> StoreNode:
        node = await store.start(config, member, layout, peers, on_gone=peers.report_gone, progress=Touched(say))
        node.leaving.on_begin = lambda: peers.update(replace(member, ready=False))
        return node

    async def again(member: Member) -> tuple[Service, Member]:
        return await start(member), member

    async def leave(service: Service) -> None:
        assert isinstance(service, store)
        timing = spec.config.timing
        await workers_gone(peers, spec.node, 2 * timing.heartbeat_ms / 1e3, timing.drain_ms / 1e3)
        await landings_ended(lambda: service.numbers()["landings_open"], spec.config.store.drain_ms / 1e3)
        report = await service.leave()
        if report.blocks_saved or report.blocks_left:
            say(
                f"moved out: {report.blocks_saved} blocks ({sized(report.bytes_saved)}) saved, "
                f"{report.blocks_left} ({sized(report.bytes_left)}) not"
            )

    node = await start(member)
    slots = node.slots.total(layout.slot_bytes)
    memory = f"pool {sized(slots * layout.slot_bytes)}, {slots} slots of {sized(layout.slot_bytes)}"
    say(f"memory: {memory}")
    for line in node.lower.lines():
        say(line)
    return Made(node, replace(member, details={"memory": memory}), again, leave=leave)


async def _worker(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    config = spec.config
    engine, memory = await asyncio.to_thread(_load_engine, spec, say)
    config = decided(config, engine.backend_name)
    member = replace(
        member,
        layout=engine.layout,
        max_context=engine.max_context,
        max_prompt=engine.pages.total * config.engine.block_tokens,
        details={
            "memory": memory,
            "engine": engine.backend_name,
            "engine_note": engine.backend_note,
            "device": engine.device_note,
            "dtype": config.model.dtype,
            "model": str(spec.model_dir),
            "turns": turns(config),
        },
    )
    start = await asyncio.to_thread(_worker_start, spec.role, config)
    # What was imported and loaded stays. Looking through it all takes the collector a second on a slow core: in the middle of a
    # request that silences a worker for long enough to be declared dead.
    gc.collect()
    gc.freeze()

    async def again(member: Member) -> tuple[Service, Member]:
        start = await asyncio.to_thread(_worker_start, member.role, config)
        engine.pages.clear_cached()
        if engine.pages.used:
            raise Bug(f"{member.id}: the life before left {engine.pages.used} pages held")
        return await start(config, engine, member, peers), member

    return Made(await start(config, engine, member, peers), member, again, [engine.close], lost=engine.lost)


def with_tenant_quotas(config: Config) -> Config:
    """``config`` with what the file of API keys says of tenants' shares of a pool; ``store.quotas`` overrules it."""
    quotas = {**pool_quotas(config.security.api_keys_file), **config.store.quotas}
    return config.model_copy(update={"store": config.store.model_copy(update={"quotas": quotas})})


class Touched:
    """Says how far taking the pool's memory has come, at most once a second: several GiB take a while."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        """Bytes. Called by the thread that takes them."""
        now = self._clock()
        if now >= self._said + PROGRESS_S:
            self._said = now
            self._say(f"pool: {done / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB of memory taken")


def _load_engine(spec: RoleSpec, say: Say) -> tuple[Engine, str]:
    """The engine, and its memory budget in words (said before the memory is taken)."""
    from moonpool.engine.engine import load_engine, memory_budget
    from moonpool.engine.kernel_cache import what_to_wait_for

    budget = memory_budget(spec.config, spec.model_dir)
    say(f"memory: {budget}")
    if wait := what_to_wait_for():
        say(wait)
    own = own_threads(spec.config, spec.role)
    engine = load_engine(spec.config, spec.model_dir, threads=spec.threads, own_threads=own)
    where = "" if engine.device_note == "cpu" else f" on {engine.device_note}"
    say(f"engine: {engine.backend_name}{where}" + (f" ({engine.backend_note})" if engine.backend_note else ""))
    return engine, str(budget)


def _gateway_class() -> type[Gateway]:
    from moonpool.cluster.gateway.service import Gateway

    return Gateway


def _store_class() -> type[StoreNode]:
    from moonpool.kvstore.node import StoreNode

    return StoreNode


def _worker_start(role: Role, config: Config) -> StartWorker:
    if role is Role.PREFILL:
        from moonpool.prefill_worker.worker import PrefillWorker

        return PrefillWorker.start
    if role is Role.DECODE and not config.scheduler.colocate:
        from moonpool.decode_worker.worker import DecodeWorker

        return DecodeWorker.start
    from moonpool.cluster.both import BothWorker

    return BothWorker.start
