"""NIXL alone for ``moonpool bench store``; runs in an interpreter that has it. Nothing of Moonpool is imported.

One-sided writes and reads between two processes over whatever UCX finds best on this host (shared memory). No store: no
names, no digests, the places agreed on beforehand. Orders are JSON lines.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

os.environ.update({"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"})
if not os.path.isdir("/sys/class/infiniband"):
    os.environ["UCX_MODULES"] = "^ib"
ARENA = 64 << 20


def agent(name: str) -> tuple[Any, Any, int]:
    import numpy as np
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    one = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    memory = np.ones(ARENA + 4096, np.uint8)
    base = (memory.ctypes.data + 4095) // 4096 * 4096
    one.register_memory([(base, ARENA, 0, "")], "DRAM")
    return one, memory, base


def target() -> None:
    one, _memory, base = agent("target")
    print(json.dumps([one.get_agent_metadata().hex(), base]), flush=True)
    polling = False
    while True:
        if polling:
            one.get_new_notifs()
            if not select.select([sys.stdin], [], [], 0)[0]:
                continue
        order = sys.stdin.readline()  # while nothing is measured, it waits here and disturbs nobody
        if not order:
            return
        polling = order == "begin\n"
        print("so", flush=True)


def main() -> None:
    other = subprocess.Popen([sys.executable, __file__, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    metadata, there = json.loads(other.stdout.readline())
    one, _memory, here = agent("initiator")
    name = one.add_remote_agent(bytes.fromhex(metadata))
    name = name.decode() if isinstance(name, bytes) else name

    def say(order: str) -> None:
        other.stdin.write(order + "\n")  # type: ignore[union-attr]
        other.stdin.flush()  # type: ignore[union-attr]
        other.stdout.readline()  # type: ignore[union-attr]

    def moved(operation: str, size: int, count: int) -> float:
        begun = time.perf_counter()
        per = min(count, ARENA // size)
        for first in range(0, count, per):
            places = [i * size for i in range(min(per, count - first))]
            local = one.get_xfer_descs([(here + at, size, 0) for at in places], "DRAM")
            remote = one.get_xfer_descs([(there + at, size, 0) for at in places], "DRAM")
            handle = one.initialize_xfer(operation, local, remote, name)
            state = one.transfer(handle)
            while state == "PROC":
                state = one.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"nixl: a transfer ended as {state}")
            one.release_xfer_handle(handle)
        return time.perf_counter() - begun

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] != "move":
            print("null", flush=True)
            continue
        say("begin")
        took = [moved(operation, order["size"], order["count"]) for operation in ("WRITE", "READ")]
        say("end")
        print(json.dumps(took), flush=True)
    other.stdin.close()
    other.wait(10)


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else main()
