"""Store nodes as processes: python -m support.store_process SPEC runs one, with the layout of ``support.store``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from moonpool.cluster import roles
from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.cluster.run import run_role
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb
from support.store import LAYOUT, config, member, until

TESTS = Path(__file__).parents[1]


@dataclass
class Processes:
    folder: Path
    settings: Config
    registry: str
    peers: Membership
    changes: list[MemberChange] = field(default_factory=list)  # as they came
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def start(self, node: str) -> None:
        """Returns once everybody knows it. A former process of that node must have ended."""
        if node in self.children:
            with self.children.pop(node) as former:
                former.wait(5)
        spec = RoleSpec(
            MemberId(f"store-{node}"), Role.STORE, NodeId(node), self.settings, self.registry, self.folder / "no-model"
        )
        file = self.folder / f"{node}.json"
        file.write_text(spec.to_json())
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        command = [sys.executable, "-m", "support.store_process", str(file)]
        with (self.folder / f"{node}.log").open("ab") as log:
            self.children[node] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        await until(lambda: self.live(node), f"node {node} joined\n{self.log(node)}", 30)

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()

    def member(self, node: str) -> Member:
        found = self.peers.store_of(NodeId(node))
        assert found is not None
        return found

    def live(self, node: str) -> bool:
        return self.peers.store_of(NodeId(node)) is not None

    def signal(self, node: str, number: int) -> None:
        self.children[node].send_signal(number)

    async def numbers(self, node: str) -> dict[str, float]:
        async with grpc.aio.insecure_channel(self.member(node).address) as channel:
            return dict((await pb.store_rpc.StoreStub(channel).Stats(pb.types.Empty(), timeout=5)).numbers)

    @asynccontextmanager
    async def worker(self, node: str, name: str) -> AsyncIterator[WorkerStore]:
        client = await WorkerStore.connect(
            self.member(node).address,
            member(name, Role.DECODE, node, incarnation=Incarnation(1)),
            LAYOUT,
            on_landed=lambda _: None,
            on_failed=lambda _: None,
            on_lost=lambda: None,
            timing=self.settings.timing,
        )
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def store_processes(folder: Path, *nodes: str, **sections: dict[str, Any]) -> AsyncIterator[Processes]:
    """A registry here, and a process for each of ``nodes``; bytes between them go by the carrier that a user gets."""
    given = {"transfer": {"carrier": "auto"}, "cluster": {"key_file": str(folder / "hash.key")}} | sections
    settings = config(folder, slots=32, **given)
    async with AsyncExitStack() as stack:
        registry = Registry(settings.timing)
        address = await registry.start("127.0.0.1")
        stack.push_async_callback(registry.close)
        peers = Membership(address, settings.timing, lambda why, replaced: None)
        stack.push_async_callback(peers.leave)
        made = Processes(folder, settings, address, peers)
        stack.callback(peers.subscribe(made.changes.append))
        try:
            for node in nodes:
                await made.start(node)
            yield made
        finally:
            for child in made.children.values():
                if child.poll() is None:
                    child.send_signal(signal.SIGCONT)
                    child.terminate()
            for child in made.children.values():
                with child:
                    await asyncio.to_thread(child.wait, 20)


def gone(change: MemberChange) -> bool:
    return change.liveness is Liveness.GONE


if __name__ == "__main__":
    read = RoleSpec.from_json(Path(sys.argv[1]).read_text())
    roles.kv_layout = lambda *_: LAYOUT
    asyncio.run(run_role(read, roles.make, lambda line: print(line, flush=True), lifeline=0))
