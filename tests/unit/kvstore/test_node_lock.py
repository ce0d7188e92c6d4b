"""Who is the store node of a name in a state folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.store import LAYOUT, Roll, config, member, store_node

from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.node_lock import NodeLock, holder

HOLD = """
import sys
from pathlib import Path
from moonpool.kvstore.node_lock import NodeLock
lock = NodeLock.take(Path(sys.argv[1]), "a")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_the_first_one_named_until_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert holder(tmp_path, "a") == other.pid
        with pytest.raises(ConfigError, match=f"process {other.pid} is the store node 'a'"):
            NodeLock.take(tmp_path, "a")
        NodeLock.take(tmp_path, "b").release()  # another node of this folder
        other.kill()
        other.wait()
    assert holder(tmp_path, "a") == 0
    lock = NodeLock.take(tmp_path, "a")
    assert holder(tmp_path, "a") == os.getpid()
    lock.release()
    lock.release()
    assert holder(tmp_path, "a") == 0


async def test_a_second_node_of_the_same_name_leaves_the_first_ones_sockets_alone(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()):
        before = {path: path.stat().st_ino for path in tmp_path.glob("*.sock")}
        assert len(before) == 2
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is the store node 'a'"):
            await StoreNode.start(config(tmp_path), member("store-a", Role.STORE, "a"), LAYOUT, Roll())
        assert {path: path.stat().st_ino for path in tmp_path.glob("*.sock")} == before
    async with store_node(config(tmp_path), Roll()):
        pass


async def test_an_unusable_ssd_folder_is_said_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    taken: list[int] = []
    settings = config(tmp_path, store={"ssd_path": str(tmp_path / "file"), "ssd_bytes": 64 * MIB})
    with pytest.raises(ConfigError, match="ssd_path"):
        await StoreNode.start(
            settings,
            member("store-a", Role.STORE, "a"),
            LAYOUT,
            Roll(),
            progress=lambda done, total: taken.append(done),
        )
    assert not taken
    assert holder(tmp_path, "a") == 0
