"""A process with the real shell and a service that does nothing: ``python dummy_role.py SPEC``."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import grpc

from moonpool.cluster.membership import Membership
from moonpool.cluster.process import Made, Say
from moonpool.cluster.run import run_role
from moonpool.cluster.spec import RoleSpec
from moonpool.core.errors import ConfigError
from moonpool.core.membership import Member, Service, WorkerReport


class Dummy:
    """``drains``: it has something that does not end by itself."""

    def __init__(self, lives: str, drains: bool = False) -> None:
        self._lives = lives
        self._drains = drains

    async def drain(self, limit_s: float) -> None:
        if self._drains:
            print("drains", flush=True)
            await asyncio.sleep(limit_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        pass

    def numbers(self) -> dict[str, float]:
        return {"answer": 42.0}

    def words(self) -> dict[str, str]:
        return {"kind": "dummy", "lives": self._lives}

    def report(self) -> WorkerReport | None:
        return None

    async def close(self) -> None:
        pass


async def make(spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
    if spec.config.model.name == "broken":
        raise ConfigError("model.name: 'broken' cannot be loaded; use another")
    if spec.config.model.name == "starved":  # in its second life
        lives = Path(spec.config.cluster.state_dir) / "lived"
        count = len(lives.read_text()) if lives.exists() else 0
        lives.write_text("." * (count + 1))
        if count == 1:
            raise ConfigError("store.pool_bytes: 2 bytes wanted, but 1 is free; use less")
    if spec.config.model.name == "big":
        say("loading")
        await asyncio.to_thread(time.sleep, 60.0)
    first = str(member.incarnation)

    async def again(member: Member) -> tuple[Service, Member]:
        return Dummy(f"{first} {member.incarnation}"), member

    lost: Future[str] = Future()
    if spec.config.model.name == "maimed":
        lost.set_result("rank 1 has ended")
    return Made(Dummy(first, spec.config.model.name == "busy"), member, again, lost=lost)


if __name__ == "__main__":
    read = RoleSpec.from_json(Path(sys.argv[1]).read_text())
    asyncio.run(run_role(read, make, lambda line: print(line, flush=True), lifeline=0))
