"""From a role to its started service: what each one loads, imported only where it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.cluster.membership import Membership
from moonpool.cluster.models import kv_layout
from moonpool.cluster.process import Made, Say
from moonpool.cluster.spec import RoleSpec
from moonpool.core.blocks import key_id, load_hash_key
from moonpool.core.config import Config
from moonpool.core.ids import Role
from moonpool.core.membership import Member, Peers, Service

if TYPE_CHECKING:
    from moonpool.engine.engine import Engine

StartWorker = Callable[[Config, "Engine", Member, Peers], Awaitable[Service]]


async def make(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    """Loads and starts the service of ``spec.role``. MoonpoolError where configuration or machine do not allow it."""
    config = spec.config
    hash_key = load_hash_key(Path(config.cluster.key_file))
    member = replace(member, model=config.model_name, hash_key_id=key_id(hash_key))
    match spec.role:
        case Role.STORE:
            return await _store(spec, member, peers, say)
        case Role.CONDUCTOR:
            from moonpool.cluster.conductor import ConductorService

            return Made(await ConductorService.start(config, member, peers), member)
        case Role.GATEWAY:
            from moonpool.cluster.gateway.service import Gateway

            gateway = await Gateway.start(config, member, peers, hash_key, spec.model_dir)
            return Made(gateway, replace(member, details={"url": gateway.url}))
        case Role.PREFILL:
            from moonpool.prefill_worker.worker import PrefillWorker

            return await _worker(PrefillWorker.start, spec, member, peers, say)
        case Role.DECODE:
            from moonpool.decode_worker.worker import DecodeWorker

            return await _worker(DecodeWorker.start, spec, member, peers, say)
        case Role.BOTH:
            from moonpool.cluster.both import BothWorker

            return await _worker(BothWorker.start, spec, member, peers, say)


async def _store(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    from moonpool.kvstore.node import StoreNode

    layout = await asyncio.to_thread(kv_layout, spec.config, spec.model_dir)
    member = replace(member, layout=layout)
    node = await StoreNode.start(spec.config, member, layout, peers, on_gone=peers.report_gone)
    slots, slot_mib = node.slots.total, layout.slot_bytes / (1 << 20)
    memory = f"pool {slots * slot_mib:.1f} MiB, {slots} slots of {slot_mib:.1f} MiB"
    say(f"memory: {memory}")
    return Made(node, replace(member, details={"memory": memory}))


async def _worker(start: StartWorker, spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    from moonpool.engine.engine import load_engine, memory_budget

    config = spec.config
    budget = await asyncio.to_thread(memory_budget, config, spec.model_dir)
    say(f"memory: {budget}")
    engine = await asyncio.to_thread(load_engine, config, spec.model_dir, threads=spec.threads)
    member = replace(
        member,
        layout=engine.layout,
        max_context=engine.max_context,
        max_prompt=engine.pages.total * config.engine.block_tokens,
        details={"memory": str(budget), "dtype": config.model.dtype, "model": str(spec.model_dir)},
    )
    return Made(await start(config, engine, member, peers), member, [engine.close])
