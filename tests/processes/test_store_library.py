"""Users of the store library in processes of their own, one of them dead in the middle of a put."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from support.library_user import VALUE
from support.store import LAYOUT, Roll, config, member, until

from moonpool.core.config import MIB
from moonpool.core.ids import Role
from moonpool.kvstore import Put, StoreClient
from moonpool.kvstore.node import StoreNode

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "tests")}


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[StoreNode]:
    me = member("store-a", Role.STORE, "a")
    node = await StoreNode.start(config(folder, store={"pool_bytes": 32 * MIB, "region_bytes": 32 * MIB}), me, LAYOUT, Roll())
    try:
        yield node
    finally:
        await node.close()


class User:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode().strip()

    async def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()


@asynccontextmanager
async def user(folder: Path, what: str) -> AsyncIterator[User]:
    command = (sys.executable, "-m", "support.library_user", str(folder), what)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=ENVIRONMENT, cwd=ROOT)
    try:
        yield User(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_what_one_process_puts_another_one_gets(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        for what, said in (("get", "False False"), ("put", "stored"), ("get", "True True"), ("put", "there")):
            async with user(tmp_path, what) as other:
                assert await other.hear() == said
        await until(lambda: node.numbers()["sessions"] == 0, "all have left")
        assert (node.pool.numbers()["pins"], node.numbers()["pidfds"]) == (0, 0)


async def test_a_writer_killed_in_mid_put_leaves_nothing_to_be_read_and_its_room_comes_back(tmp_path: Path) -> None:
    async with started(tmp_path) as node, await StoreClient.connect(tmp_path) as client, user(tmp_path, "half") as other:
        assert await other.hear() == "half"
        assert node.pool.numbers()["slots_reserved"] == 8
        assert (await client.exists("v"), await client.get("v")) == (False, None)
        assert await client.put("v", VALUE) is Put.COMING
        assert await client.remove("v") == 0
        other.process.send_signal(signal.SIGKILL)
        await until(lambda: node.pool.numbers()["reservations"] == 0, "its slots are free", 5)
        assert (await client.exists("v"), await client.get("v")) == (False, None)
        assert await client.put("v", VALUE) is Put.STORED
        assert await client.get("v") == VALUE


async def test_a_writer_that_only_lost_its_connection_keeps_its_room_until_it_is_dead(tmp_path: Path) -> None:
    async with started(tmp_path) as node, await StoreClient.connect(tmp_path) as client, user(tmp_path, "half") as other:
        assert await other.hear() == "half"
        await other.tell("hang up")
        assert await other.hear() == "hung up"
        await until(lambda: node.pool.numbers()["slots_fenced"] == 8, "fenced")
        assert await client.put("v", VALUE) is Put.STORED  # another writer need not wait: it has slots of its own
        assert node.pool.numbers()["slots_fenced"] == 8
        other.process.kill()
        await until(lambda: node.pool.numbers()["slots_fenced"] == 0, "free by proof of death", 5)
        assert await client.get("v") == VALUE
        await until(lambda: node.numbers()["pidfds"] == 1, "only we are watched")


def verb(folder: Path, *words: str) -> list[str]:
    settings = ["--set", f"cluster.state_dir={folder}", "--set", f"cluster.key_file={folder / 'hash.key'}"]
    return [sys.executable, "-m", "moonpool.cli.main", "store", *words, *settings]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """``moonpool store serve``; gives its socket."""
    command = verb(folder, "serve", "--pool", "64MiB")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT) as node:
        assert node.stderr is not None
        try:
            said = node.stderr.readline()
            found = re.search(r"clients connect to (\S+)", said)
            assert found, said
            yield found[1]
        finally:
            node.terminate()
            assert node.wait(10) == 128 + signal.SIGTERM


def test_the_example_runs_against_a_node_by_itself(tmp_path: Path) -> None:
    with serving(tmp_path) as path:
        example = [sys.executable, str(ROOT / "examples/store_client.py"), path]
        done = subprocess.run(example, capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "from another process: stored, found, equal" in done.stdout
    assert not list(tmp_path.glob("*.sock"))


def test_a_second_node_by_itself_is_refused_and_other_verbs_say_what_the_first_one_is(tmp_path: Path) -> None:
    with serving(tmp_path) as path, StoreClient.connect_sync(tmp_path) as client:
        assert client.put("v", b"x") is Put.STORED
        for words, said in (
            (("serve", "--pool", "64MiB"), "is the store node 'local'"),
            (("stats",), "users of the library only"),
        ):
            done = subprocess.run(
                verb(tmp_path, *words), capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=ROOT, timeout=60
            )
            assert (done.returncode, said in done.stderr) == (2, True), done.stderr
            assert re.search(r"process \d+", done.stderr)
        assert Path(path).is_socket()
        with StoreClient.connect_sync(path) as another:
            assert another.get("v") == b"x"


def test_what_the_documentation_shows_runs_as_it_stands(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    said = ["[[ 0.  1.  2.  3.]", "bytearray(b'two')", "3 blocks, 3 are here"]
    folder = tmp_path / ".cache/moonpool/clusters/store"
    folder.mkdir(parents=True, mode=0o700)
    with serving(folder):
        for snippet, words in zip(snippets, said, strict=True):
            command = [sys.executable, "-c", snippet]
            home = ENVIRONMENT | {"HOME": str(tmp_path)}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=home, cwd=ROOT, timeout=60)
            assert done.returncode == 0, done.stderr
            assert words in done.stdout
