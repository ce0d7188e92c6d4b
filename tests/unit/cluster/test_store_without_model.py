"""A store node that knows no model takes values, and blocks of whatever layout its users name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member

from moonpool.cli.run_role import _spec
from moonpool.cluster.roles import make
from moonpool.core.config import MIB
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.kvstore import Put, StoreClient


class Members(Roll):
    """A membership, as far as a store node uses one."""

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        raise AssertionError(f"{member} was reported: users of the library are no members")


async def test_a_store_node_without_a_model_serves_values_and_blocks_of_any_layout(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"path": ""},
        "store": {"pool_bytes": 48 * MIB, "region_bytes": 48 * MIB, "ssd_path": f"{tmp_path}/ssd", "ssd_bytes": 64 * MIB},
        "cluster": {"registry": "127.0.0.1:1"},
    }
    spec = _spec("store", "", "a", config(tmp_path, **sections))
    said: list[str] = []
    peers: Any = Members()
    me = replace(member("store-a", Role.STORE, "a"), layout=None)
    made = await make(spec, me, peers, said.append)
    try:
        keys = block_keys("k", 3)
        async with await StoreClient.connect(tmp_path) as client:
            assert await client.put("v", b"x") is Put.STORED
            assert await client.put_blocks(LAYOUT, [(key, block_bytes(key)) for key in keys]) == [Put.STORED] * 3
            into = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in keys]
            assert await client.get_blocks(LAYOUT, keys, into) == 3
        assert (made.member.layout, made.member.model) == (None, "")
        assert said[0].startswith("memory: pool")
        assert said[1] == f"ssd: 64.0 MiB at {tmp_path}/ssd/a, 8 segments, 0 blocks found"
    finally:
        await made.service.close()
