"""A prefill worker in a process of its own that stands still before the last layer of every prompt, to be killed or stopped.

``python -m support.prefill_process FILE``: FILE holds lines of base64: config (JSON), its own member, then its peers.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moonpool.core.config import Config
from moonpool.core.membership import Member
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, parse, to_wire

TESTS = Path(__file__).parents[1]
START_S = 60.0


@asynccontextmanager
async def prefill_process(folder: Path, config: Config, me: Member, peers: list[Member]) -> AsyncIterator[tuple[int, Member]]:
    """Its process id, and ``me`` with the address where it is ready. It is killed in the end."""
    parts = [config.model_dump_json().encode(), *(to_wire(m, pb.types.Member()).SerializeToString() for m in (me, *peers))]
    file = folder / f"{me.id}.lines"
    file.write_bytes(b"\n".join(base64.b64encode(part) for part in parts))
    with (folder / f"{me.id}.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.prefill_process", str(file)),
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
    try:
        assert child.stdout is not None
        address = (await asyncio.wait_for(child.stdout.readline(), START_S)).decode().strip()
        assert address, (folder / f"{me.id}.log").read_text()
        yield child.pid, replace(me, address=address)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _serve(lines: list[bytes]) -> None:
    from moonpool.engine.engine import load_engine
    from moonpool.prefill_worker.worker import PrefillWorker
    from moonpool.wire import channels
    from support.groups import Halt
    from support.workers import Crowd

    config = Config.model_validate_json(lines[0])
    me, *peers = (from_wire(parse(line, pb.types.Member), Member) for line in lines[1:])
    model = Path(config.model.path)
    engine = load_engine(config, model, threads=1, cache=model)
    Halt(engine)
    server = channels.server()
    port = server.add_insecure_port("127.0.0.1:0")
    me = replace(me, address=f"127.0.0.1:{port}")
    worker = await PrefillWorker.start(config, engine, me, Crowd([me, *peers]))
    worker.add_to(server)
    await server.start()
    print(me.address, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve([base64.b64decode(line) for line in Path(sys.argv[1]).read_bytes().split(b"\n")]))
