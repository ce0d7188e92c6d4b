"""NIXL alone between two processes over TCP loopback, for ``moonpool bench carrier``; runs in an interpreter that has it.

Orders as JSON lines: ``{"piece": bytes, "count": pieces, "pushes": n}`` is answered by the seconds they took and the CPU
seconds of both processes. Nothing of Moonpool is imported. Both sides poll without sleeping: NIXL at its fastest.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

os.environ.update({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"})
if not os.path.isdir("/sys/class/infiniband"):
    os.environ["UCX_MODULES"] = "^ib"
ARENA = 128 << 20


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
        print(json.dumps(time.process_time()), flush=True)


def main() -> None:
    other = subprocess.Popen([sys.executable, __file__, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    metadata, there = json.loads(other.stdout.readline())
    one, _memory, here = agent("initiator")
    name = one.add_remote_agent(bytes.fromhex(metadata))
    name = name.decode() if isinstance(name, bytes) else name
    print("ready", flush=True)

    def cpu(order: str) -> float:
        """Seconds of both processes; from ``begin`` to ``end`` the other one polls."""
        other.stdin.write(order + "\n")  # type: ignore[union-attr]
        other.stdin.flush()  # type: ignore[union-attr]
        return float(other.stdout.readline()) + time.process_time()  # type: ignore[union-attr]

    for line in sys.stdin:
        order = json.loads(line)
        piece, count, pushes = order["piece"], order["count"], order["pushes"]
        before, begun = cpu("begin"), time.perf_counter()
        for number in range(pushes):
            at = number * piece * count % (ARENA - piece * count + 1)
            spread = [(at + i * piece, at + (count - 1 - i) * piece) for i in range(count)]
            local = one.get_xfer_descs([(here + offset, piece, 0) for offset, _ in spread], "DRAM")
            remote = one.get_xfer_descs([(there + to, piece, 0) for _, to in spread], "DRAM")
            handle = one.initialize_xfer("WRITE", local, remote, name, b"x")
            state = one.transfer(handle)
            while state == "PROC":
                state = one.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"a write ended as {state}")
            one.release_xfer_handle(handle)
        took = time.perf_counter() - begun
        print(json.dumps([took, cpu("end") - before]), flush=True)
    other.stdin.close()
    other.wait(10)


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else main()
