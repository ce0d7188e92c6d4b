"""Another user of the same host: the kernel says who calls, whatever the modes of sockets have become."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.store import LAYOUT, Roll, config, member

from moonpool.core.config import MIB
from moonpool.core.ids import Role
from moonpool.kvstore.node import StoreNode
from moonpool.wire.frames import encode_hand_over

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

NOBODY = 65_534
ASK = """
import os, socket, sys
os.setgid({nobody}); os.setuid({nobody})
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.settimeout(10)
try:
    line.connect(sys.argv[1])
    line.send(bytes.fromhex(sys.argv[2]))
    print(line.recv(4096).hex() or "hung up")
except PermissionError:
    print("no permission")
except (ConnectionError, BrokenPipeError):
    print("hung up")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users may enter, unlike those of tests."""
    folder = Path(tempfile.mkdtemp(prefix="mp-others-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[StoreNode]:
    settings = config(folder, store={"pool_bytes": 16 * MIB, "region_bytes": 16 * MIB})
    node = await StoreNode.start(settings, member("store-a", Role.STORE, "a"), LAYOUT, Roll())
    try:
        yield node
    finally:
        await node.close()


async def ask(path: Path, message: bytes) -> str:
    """What somebody who is not us hears there."""
    command = (sys.executable, "-I", "-S", "-c", ASK.format(nobody=NOBODY), str(path), message.hex())
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


async def test_others_are_refused_by_modes_and_where_modes_let_them_in_by_the_kernels_word(open_folder: Path) -> None:
    async with started(open_folder) as node:
        assert node.host_face is not None
        agent, face = node.lives.agent, node.host_face
        assert {stat.S_IMODE(Path(region.path).stat().st_mode) for region in node.regions.files} == {0o600}
        for path in (agent.path, face.path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert await ask(path, b"hello") == "no permission"
            path.chmod(0o666)
        refused = agent.refused
        assert await ask(agent.path, encode_hand_over(1)) == "hung up"
        assert agent.refused == refused + 1
        assert await ask(face.path, b"hello") == "hung up"
        assert face.counted["refused"] == 1
