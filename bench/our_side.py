"""Our cluster as one side of a comparison: what it is started with, and what else a comparison asks of it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from moonpool.bench.local_cluster import BOTH, SPLIT, LocalCluster
from moonpool.cluster.survey import TIMEOUT_S, members
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness
from moonpool.core.parsing import read_json
from moonpool.wire import pb
from moonpool.wire.channels import dial

ENGINES = ("auto", "compiled", "fused", "torch")
_WORKERS = ("prefill", "decode", "both")
_HOLD_PAGES = (Role.PREFILL, Role.DECODE, Role.BOTH)


def nodes_of(roles: str) -> str:
    """``both``, ``split``, or cluster.nodes as JSON. ConfigError: none of these."""
    named = {"both": BOTH, "split": SPLIT}.get(roles)
    if named is not None:
        return named
    try:
        listed = read_json(roles)
    except ValueError as e:
        raise ConfigError(f"roles: {roles!r} is unknown; use both, split or cluster.nodes as JSON", param="roles") from e
    if not isinstance(listed, list) or not all(isinstance(node, dict) for node in listed):
        raise ConfigError("roles: cluster.nodes is a list of nodes; see docs/deployment.md", param="roles")
    return json.dumps(listed)


def kv_settings(nodes: str, kv_bytes: int) -> dict[str, str]:
    """``kv_bytes`` for KV in all: half as pages, shared by the workers, half as pool, shared by the nodes."""
    listed = json.loads(nodes)
    workers = sum(int(node.get(role, 0)) for node in listed for role in _WORKERS)
    return {
        "engine.page_bytes": str(kv_bytes // 2 // max(workers, 1)),
        "store.pool_bytes": str(kv_bytes // 2 // len(listed)),
    }


def engine_settings(engine: str) -> dict[str, str]:
    """``auto`` leaves the choice to the configuration. ConfigError: no such engine."""
    if engine not in ENGINES:
        raise ConfigError(f"engine: {engine!r} is unknown; use {', '.join(ENGINES)}", param="engine")
    return {} if engine == "auto" else {"engine.backend": engine}


def our_settings(nodes: str, kv_bytes: int, engine: str, further: Mapping[str, str]) -> dict[str, str]:
    """``further`` settings win. ConfigError: no such engine."""
    return {
        "model.dtype": "bfloat16",
        "transfer.carrier": "auto",
        **engine_settings(engine),
        **kv_settings(nodes, kv_bytes),
        **further,
    }


async def forget_pages(cluster: LocalCluster) -> None:
    """Workers drop the device pages that only wait for reuse: prefixes then come from the pool."""
    for change in await members(cluster.registry):
        if change.liveness is Liveness.LIVE and change.member.role in _HOLD_PAGES:
            async with dial(change.member.address) as channel:
                await pb.admin_rpc.AdminStub(channel).ClearDevicePages(pb.types.Empty(), timeout=TIMEOUT_S)


async def engines_of(cluster: LocalCluster) -> dict[str, str]:
    """The backend that each worker really computes with."""
    return {
        change.member.id: change.member.details.get("engine", "unknown")
        for change in await members(cluster.registry)
        if change.liveness is Liveness.LIVE and change.member.role in _HOLD_PAGES
    }
