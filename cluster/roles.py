"""From a role to its started service: what each one loads, imported only where it runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from moonpool.cluster.membership import Membership
from moonpool.cluster.models import kv_layout
from moonpool.cluster.process import Made, Say
from moonpool.cluster.spec import RoleSpec
from moonpool.core.blocks import key_id, load_hash_key
from moonpool.core.ids import Role
from moonpool.core.membership import Member

_WORKERS = {
    Role.PREFILL: ("moonpool.prefill_worker.worker", "PrefillWorker"),
    Role.DECODE: ("moonpool.decode_worker.worker", "DecodeWorker"),
    Role.BOTH: ("moonpool.cluster.both", "BothWorker"),
}


async def make(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    """Loads and starts the service of ``spec.role``. MoonpoolError where configuration or machine do not allow it."""
    config = spec.config
    hash_key = load_hash_key(Path(config.cluster.key_file))
    member = replace(member, model=config.model_name, hash_key_id=key_id(hash_key))
    if spec.role is Role.STORE:
        return await _store(spec, member, peers, say)
    if spec.role in _WORKERS:
        return await _worker(spec, member, peers, say)
    raise NotImplementedError(spec.role)


async def _store(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    layout = await asyncio.to_thread(kv_layout, spec.config, spec.model_dir)
    member = replace(member, layout=layout)
    node: Any = import_module("moonpool.kvstore.node").StoreNode
    return Made(await node.start(spec.config, member, layout, peers), member)


async def _worker(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
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
    module, name = _WORKERS[spec.role]
    worker: Any = getattr(import_module(module), name)
    return Made(await worker.start(config, engine, member, peers), member, [engine.close])
