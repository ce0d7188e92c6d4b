"""Mooncake Store for ``moonpool bench store``; runs in an interpreter that has it. Nothing of Moonpool is imported.

Three processes, as in use: its master, a donor that lends the memory, and this one, which lends none, so that every byte
crosses to the donor's process (over TCP loopback: the only transport of its CPU build). Orders are JSON lines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.update({"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_FORCE_TCP": "1"})
ARENA = 64 << 20
LENT = 768 << 20
BATCH = 16  # its fastest here
LEASE_S = 0.35  # a read value cannot be removed before


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start_master(rpc: int, http: int) -> subprocess.Popen[bytes]:
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.origin is not None
    program = os.path.join(os.path.dirname(found.origin), "mooncake_master")
    options = [f"-rpc_port={rpc}", "-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1"]
    options += [f"-http_metadata_server_port={http}", f"-metrics_port={free_port()}", "-default_kv_lease_ttl=300"]
    options += ["-logtostderr=0", f"-log_dir={tempfile.gettempdir()}"]
    return subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def join(rpc: int, http: int, lent: int, buffer: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    metadata = f"http://127.0.0.1:{http}/metadata"
    for _ in range(50):
        if store.setup(f"127.0.0.1:{free_port()}", metadata, lent, buffer, "tcp", "", f"127.0.0.1:{rpc}") == 0:
            return store
        time.sleep(0.2)
    raise SystemExit("mooncake: no store could be set up")


def donor(rpc: int, http: int) -> None:
    store = join(rpc, http, LENT, 16 << 20)
    print("lent", flush=True)
    sys.stdin.read()
    store.close()


class Arenas:
    """Registered and touched memory to put from and to get into."""

    def __init__(self, store: Any) -> None:
        import numpy as np

        self.store = store
        self._source = np.random.default_rng(0).integers(0, 255, ARENA, np.uint8)
        self._target = np.ones(ARENA, np.uint8)
        for arena in (self._source, self._target):
            if store.register_buffer(arena.ctypes.data, arena.nbytes):
                raise SystemExit("mooncake: a buffer could not be registered")
        self._turn = 0

    def move(self, size: int, count: int) -> list[float]:
        """Seconds: [put, get]."""
        self._turn += 1
        keys = [f"{self._turn}-{i}" for i in range(count)]
        at = [i * size % (ARENA - size + 1) for i in range(count)]
        took = []
        for arena, call, good in (
            (self._source, self.store.batch_put_from, 0),
            (self._target, self.store.batch_get_into, size),
        ):
            begun = time.perf_counter()
            for i in range(0, count, BATCH):
                part = at[i : i + BATCH]
                found = call(keys[i : i + BATCH], [arena.ctypes.data + a for a in part], [size] * len(part))
                if any(one != good for one in found):
                    raise SystemExit(f"mooncake: answered {found}")
            took.append(time.perf_counter() - begun)
        if size * count <= ARENA and (self._target[: size * count] != self._source[: size * count]).any():
            raise SystemExit("mooncake: a value came back changed")
        time.sleep(LEASE_S)
        for key in keys:
            self.store.remove(key)
        return took

    def exists(self) -> list[float]:
        """[microseconds of one at the median, keys a second in batches of 1,000]."""
        names = [f"model/layer/{i}" for i in range(1000)]
        self.store.batch_put_from(names[::2], [self._source.ctypes.data] * 500, [64] * 500)
        taken = []
        for name in names * 2:
            begun = time.perf_counter()
            self.store.is_exist(name)
            taken.append((time.perf_counter() - begun) * 1e6)
        rates = []
        for _ in range(50):
            begun = time.perf_counter()
            self.store.batch_is_exist(names)
            rates.append(len(names) / (time.perf_counter() - begun))
        return [statistics.median(taken), statistics.median(rates)]


def main() -> None:
    rpc, http = free_port(), free_port()
    with start_master(rpc, http) as master:
        try:
            lender = [sys.executable, __file__, str(rpc), str(http)]
            with subprocess.Popen(lender, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdin is not None and other.stdout is not None
                if "lent" not in other.stdout.read(4):
                    raise SystemExit("mooncake: no memory was lent")
                arenas = Arenas(join(rpc, http, 0, 128 << 20))
                print("ready", flush=True)
                for line in sys.stdin:
                    order = json.loads(line)
                    moved = order["do"] == "move"
                    answer = arenas.move(order["size"], order["count"]) if moved else arenas.exists()
                    print(json.dumps(answer), flush=True)
                arenas.store.close()
                other.stdin.close()
                other.wait(10)
        finally:
            master.terminate()


if __name__ == "__main__":
    donor(int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else main()
