"""A process with the real shell and a service that does nothing: ``python dummy_role.py SPEC``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc

from moonpool.cluster.membership import Membership
from moonpool.cluster.process import Made, Say
from moonpool.cluster.run import run_role
from moonpool.cluster.spec import RoleSpec
from moonpool.core.errors import ConfigError
from moonpool.core.membership import Member, Service, WorkerReport


class Dummy:
    def __init__(self, lives: str) -> None:
        self._lives = lives

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
    first = str(member.incarnation)

    async def again(member: Member) -> tuple[Service, Member]:
        return Dummy(f"{first} {member.incarnation}"), member

    return Made(Dummy(first), member, again)


if __name__ == "__main__":
    read = RoleSpec.from_json(Path(sys.argv[1]).read_text())
    sys.exit(asyncio.run(run_role(read, make, lambda line: print(line, flush=True), lifeline=0)))
