"""``moonpool bench store``: values put into and got from a store node in another process of this host.

One client thread, digests on, all buffers and the pool touched before. In turns, so that a machine that speeds up or slows
down does so for all: a plain copy (``memcpy``) between the same client buffers and memory of the pool's kind, that copy
followed by a digest of each block, puts, gets, and the peers' puts and gets. A put ends when the store node has
acknowledged it as sealed. Before each, other memory is read and written, so that none finds its buffers in the cache. Ratios
are made within one turn; the median over the turns is reported.

Keys of the result:

    put_vs_copy_digest, get_vs_copy_digest    speed over copy-and-digest's, blocks of 1 MiB; ..._64k, ..._16m
    put_vs_memcpy, get_vs_memcpy              speed over the plain copy's; ..._64k, ..._16m
    put_gbs, get_gbs, memcpy_gbs, copy_digest_gbs    10^9 bytes a second, 1 MiB; ..._64k, ..._16m
    pieces_64k_gbs                            the slower of putting and getting values of 64 KiB, 64 a call
    scattered_64k_gbs                         the slower of putting and getting one value in 64 buffers of 64 KiB
    many_small_gbs                            the same for 1,024 buffers of 4 KiB
    exists_us, exists_p99_us                  one name at a time, microseconds
    exists_batched_per_s                      block keys, 4,096 a call; exists_names_per_s: names, hashed on the way
    mooncake_put_gbs, mooncake_get_gbs, put_vs_mooncake, get_vs_mooncake    ...; likewise nixl_: one-sided, no digest
    mooncake_exists_us, mooncake_exists_batched_per_s
    peer                                      "not given", or what could be compared
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moonpool.bench.machine import machine_facts
from moonpool.bench.store_peers import Peer, open_peers
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError, MoonpoolError
from moonpool.kvstore import Put, SyncStoreClient

SIZES = {"64k": (64 << 10, 512), "": (MIB, 64), "16m": (16 * MIB, 4)}  # bytes of a value, values of a call
POOL_BYTES = 256 * MIB
COLD_BYTES = 128 * MIB  # more than any cache
SCATTERED = {"scattered_64k": (64 << 10, 64), "many_small": (4096, 1024)}  # bytes of a buffer, buffers of a value
EXISTS_BATCH = 4096
START_S = 60.0
Bytes = NDArray[np.uint8]
Say = Callable[[str], None]


def store(*, repeats: int = 7, peer_python: str = "", say: Say = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: a side that does not start."""
    if repeats < 1:
        raise ConfigError(f"repeats: {repeats} is too few; use 1 or more", param="repeats")
    machine = machine_facts()
    with ExitStack() as stack:
        peers = open_peers(stack, peer_python, say)
        client = stack.enter_context(_served())
        out: dict[str, Any] = {}
        for name, (size, count) in SIZES.items():
            out |= _moved(client, peers, name, size, count, repeats, say)
        out["pieces_64k_gbs"] = min(out["put_gbs_64k"], out["get_gbs_64k"])
        for name, (size, count) in SCATTERED.items():
            out |= _scattered(client, name, size, count, repeats)
        out |= _existence(client, peers)
        return {**out, "peer": ", ".join(p.name for p in peers) or "not given", "machine": machine}


@contextmanager
def _served() -> Iterator[SyncStoreClient]:
    """A client of a store node that runs in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        settings = (f"cluster.state_dir={folder}", f"cluster.key_file={folder}/hash.key", f"store.pool_bytes={POOL_BYTES}")
        command = [sys.executable, "-m", "moonpool.cli.main", "store", "serve"]
        for setting in settings:
            command += ["--set", setting]
        with (Path(folder) / "log").open("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as node:
            try:
                with _connected(Path(folder), node) as client:
                    yield client
            finally:
                node.terminate()


def _connected(folder: Path, node: subprocess.Popen[bytes]) -> SyncStoreClient:
    end = time.monotonic() + START_S
    while time.monotonic() < end and node.poll() is None:
        with suppress(MoonpoolError):
            return SyncStoreClient.connect(folder)
        time.sleep(0.05)
    raise ConfigError(f"bench: the store node did not start: {(folder / 'log').read_text()[-800:]}", param="bench")


def _touched(size: int) -> Bytes:
    out = np.empty(size, np.uint8)
    out[:] = 1
    return out


def _shared(size: int) -> Bytes:
    """Touched memory of the pool's kind."""
    import mmap

    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    view = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    os.close(fd)
    view[:] = 1
    return view


class _Cold:
    """Times work on memory that is in no cache: otherwise whoever comes second to the same buffers would be faster."""

    def __init__(self) -> None:
        self._other = _touched(COLD_BYTES)

    def __call__(self, work: Callable[[], object]) -> float:
        np.add(self._other, 1, out=self._other)
        return _timed(work)


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _copy(pairs: list[tuple[Bytes, Bytes]]) -> None:
    for target, source in pairs:
        target[:] = source


def _copy_digest(pairs: list[tuple[Bytes, Bytes]]) -> None:
    for i, (target, source) in enumerate(pairs):
        target[:] = source
        xxhash.xxh3_64_intdigest(target.data, i)


def _blocks(arena: Bytes, size: int) -> list[Bytes]:
    return [arena[at : at + size] for at in range(0, len(arena), size)]


def _moved(
    client: SyncStoreClient, peers: list[Peer], name: str, size: int, count: int, repeats: int, say: Say
) -> dict[str, float]:
    total = size * count
    source, target, pool = np.random.default_rng(0).integers(0, 255, total, np.uint8), _touched(total), _shared(total)
    values, into, lent = _blocks(source, size), _blocks(target, size), _blocks(pool, size)
    inward, outward = list(zip(lent, values, strict=True)), list(zip(into, lent, strict=True))
    turns: list[dict[str, float]] = []
    cold = _Cold()
    for turn in range(repeats + 1):
        keys = [f"{name}-{turn}-{i}" for i in range(count)]
        items = list(zip(keys, values, strict=True))
        took = {"memcpy_in": cold(lambda: _copy(inward)), "digest_in": cold(lambda: _copy_digest(inward))}
        took["put"] = cold(lambda i=items: _put(client, i))  # type: ignore[misc]
        took |= {"memcpy_out": cold(lambda: _copy(outward)), "digest_out": cold(lambda: _copy_digest(outward))}
        took["get"] = cold(lambda k=keys: client.get_many(k, into))  # type: ignore[misc]
        if not np.array_equal(source, target):
            raise ConfigError("bench: a value came back changed", param="bench")
        client.remove(*keys)
        for peer in peers:
            took[f"{peer.name}_put"], took[f"{peer.name}_get"] = peer.move(size, count)
        turns.append(took)
    turns.pop(0)  # the first one warms everybody up
    end = f"_{name}" if name else ""
    out = {f"put_vs_copy_digest{end}": _ratio(turns, "digest_in", "put")}
    out[f"get_vs_copy_digest{end}"] = _ratio(turns, "digest_out", "get")
    out[f"put_vs_memcpy{end}"] = _ratio(turns, "memcpy_in", "put")
    out[f"get_vs_memcpy{end}"] = _ratio(turns, "memcpy_out", "get")
    for figure, key in (("put", "put"), ("get", "get"), ("memcpy", "memcpy_in"), ("copy_digest", "digest_in")):
        out[f"{figure}_gbs{end}"] = total / statistics.median(t[key] for t in turns) / 1e9
    for peer in peers:
        for way in ("put", "get"):
            out[f"{peer.name}_{way}_gbs{end}"] = total / statistics.median(t[f"{peer.name}_{way}"] for t in turns) / 1e9
            out[f"{way}_vs_{peer.name}{end}"] = _ratio(turns, f"{peer.name}_{way}", way)
    say(f"{size >> 10} KiB x {count}: put {out[f'put_gbs{end}']:.1f}, get {out[f'get_gbs{end}']:.1f} GB/s")
    return out


def _ratio(turns: list[dict[str, float]], other: str, mine: str) -> float:
    """How many times as fast ``mine`` was as ``other``."""
    return statistics.median(turn[other] / turn[mine] for turn in turns)


def _put(client: SyncStoreClient, items: list[tuple[str, Any]]) -> None:
    puts = client.put_many(items)
    if set(puts) != {Put.STORED}:
        raise ConfigError(f"bench: not everything was stored: {sorted(set(puts))}", param="bench")


def _scattered(client: SyncStoreClient, name: str, size: int, count: int, repeats: int) -> dict[str, float]:
    """One value, gathered from many buffers of its own memory each, and scattered into as many."""
    pieces = [np.random.default_rng(i).integers(0, 255, size, np.uint8) for i in range(count)]
    into = [_touched(size) for _ in range(count)]
    puts, gets = [], []
    for turn in range(2 * repeats + 1):
        key = f"{name}-{turn}"
        puts.append(_timed(lambda k=key: _put(client, [(k, pieces)])))  # type: ignore[misc]
        gets.append(_timed(lambda k=key: client.get(k, into=into)))  # type: ignore[misc]
        client.remove(key)
    if any(not np.array_equal(a, b) for a, b in zip(pieces, into, strict=True)):
        raise ConfigError("bench: a value came back changed", param="bench")
    put, get = [size * count / statistics.median(times[1:]) / 1e9 for times in (puts, gets)]
    return {f"{name}_gbs": min(put, get), f"{name}_put_gbs": put, f"{name}_get_gbs": get}


def _existence(client: SyncStoreClient, peers: list[Peer]) -> dict[str, float]:
    """Half of the keys that are asked for are there."""
    _put(client, [(f"here-{i}", b"x") for i in range(EXISTS_BATCH)])
    names = [f"{'here' if i % 2 else 'gone'}-{i}" for i in range(EXISTS_BATCH)]
    taken = [_timed(lambda n=name: client.exists(n)) * 1e6 for name in names]  # type: ignore[misc]
    keys = [client.key(name) for name in names]
    batched = statistics.median(_timed(lambda: client.exists_blocks(keys)) for _ in range(50))
    named = statistics.median(_timed(lambda: client.exists_many(names)) for _ in range(20))
    client.remove(*[f"here-{i}" for i in range(EXISTS_BATCH)])
    out = {
        "exists_us": statistics.median(taken),
        "exists_p99_us": statistics.quantiles(taken, n=100)[98],
        "exists_batched_per_s": EXISTS_BATCH / batched,
        "exists_names_per_s": EXISTS_BATCH / named,
    }
    for peer in peers:
        if (found := peer.exists()) is not None:
            out[f"{peer.name}_exists_us"], out[f"{peer.name}_exists_batched_per_s"] = found
    return out
