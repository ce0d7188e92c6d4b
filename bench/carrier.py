"""``moonpool bench carrier``: bytes from one process to another over loopback, by each carrier, in one run.

In turns, so that a machine that speeds up or slows down does so for all: a bare socket (``line``: ``sendall`` here, a loop of
``recv_into`` there), every carrier that is installed, and the peer. A push of a carrier has as many pieces as make 8 to 16 MB
(1,024 for the small ones), which no carrier can join; it ends when the carrier says so: bytes in place and notice handed over.
Ratios are made within one turn, and the median over the turns is reported. Digests are nobody's part here.

Keys of the result; ``X`` is a carrier (tcp, ucx, ucxx, segment), the end of a key the size of the pieces: none for 1 MiB,
``_64k``, ``_16m``, ``_small`` (1,024 x 4 KiB):

    X_gbs, line_gbs        10^9 bytes a second
    X_vs_line              speed over the bare socket's
    X_cpu_s_per_gb         CPU seconds of both processes for 10^9 bytes; line_cpu_s_per_gb
    peer_death_ms          the longest of: ..._tcp_sender, from a receiver's SIGKILL to the sender's error, and
                           ..._tcp_receiver, from a sender's SIGKILL until the receiver knows; likewise of other carriers,
                           as far as they notice at all (null: they do not, the session tells)
    nixl_gbs, tcp_vs_nixl, ucx_vs_nixl, nixl_cpu_s_per_gb
    transport              what each carrier's library says carried the bytes
    peer                   "not given", or what could be compared
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.bench.carrier_child import ARENA, Bytes, decode, encode, map_arena, no_call, receiving_end, sending_end
from moonpool.bench.machine import machine_facts
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError
from moonpool.core.landing import Region
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces

CARRIERS = ("tcp", "ucx", "ucxx", "segment")
SHAPES = {"": (MIB, 8), "_64k": (64 << 10, 128), "_16m": (16 * MIB, 1), "_small": (4 << 10, 1024)}  # a piece, pieces of a push
TURN_BYTES = 256 * MIB
DEATHS = 3
DEATH_S = 10.0
Say = Callable[[str], None]


def carrier(
    *,
    only: Sequence[str] = (),
    repeats: int = 5,
    turn_bytes: int = TURN_BYTES,
    deaths: int = DEATHS,
    peer_python: str = "",
    say: Say = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Measure ``repeats`` turns of ``turn_bytes``, and ``deaths`` of each kind; see the module for the keys.

    ConfigError: an unknown carrier, or a side that does not start.
    """
    names = _chosen(only)
    if repeats < 1:
        raise ConfigError(f"repeats: {repeats} is too few; use 1 or more", param="repeats")
    machine = machine_facts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=_memory())))
        source = np.random.default_rng(0).integers(0, 255, ARENA, np.uint8)
        line = stack.enter_context(_line(folder, source))
        ways: dict[str, _Way] = {"line": line}
        for name in names:
            ways[name] = stack.enter_context(_way(name, folder, source))
        if (peer := stack.enter_context(_nixl(peer_python, say))) is not None:
            ways["nixl"] = peer
        out: dict[str, Any] = {}
        for end, (piece, count) in SHAPES.items():
            out |= _figures(ways, end, piece, count, turn_bytes, repeats, say)
        out["transport"] = {name: way.transport() for name, way in ways.items() if isinstance(way, _Pushes)}
    noticed = {name: _deaths(name, deaths, say) for name in names if name != "segment"}
    for name, (at_sender, at_receiver) in noticed.items():
        out |= {f"peer_death_ms_{name}_sender": at_sender, f"peer_death_ms_{name}_receiver": at_receiver}
    if "tcp" in noticed:
        out["peer_death_ms"] = max(one for one in noticed["tcp"] if one is not None)
    return {**out, "peer": "nixl" if peer is not None else "not given", "machine": machine}


def _chosen(only: Sequence[str]) -> list[str]:
    for name in only:
        if name not in CARRIERS:
            raise ConfigError(f"--only: {name!r} is no carrier; use {', '.join(CARRIERS)}", param="only")
    return [name for name in only or CARRIERS if name != "ucxx" or find_spec("ucxx") is not None]


def _memory() -> str | None:
    """A folder that is memory, where there is one: the target's pages are never written to a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _Way:
    """How bytes get over. ``move`` returns (seconds, CPU seconds of both processes)."""

    def move(self, piece: int, count: int, pushes: int) -> tuple[float, float]:
        raise NotImplementedError

    def check(self, piece: int, count: int) -> None:
        """ConfigError where the last push did not arrive as it was sent."""


class _Child:
    """A ``carrier_child``, asked over its pipes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.bench.carrier_child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError(f"bench: a side ended with {self.process.wait()}", param="bench")
        return json.loads(line)

    def ask(self, do: str, **values: Any) -> Any:
        self.say({"do": do} | values)
        return self.hear()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def _child(*arguments: str) -> Iterator[_Child]:
    one = _Child(*arguments)
    try:
        yield one
    finally:
        one.end()


def _arena(folder: Path, name: str) -> Path:
    path = folder / f"moonpool+bench+{name}+0+0"  # as region files are called: no other is mapped
    with path.open("wb") as file:
        file.truncate(ARENA)
    return path


class _Bare(_Way):
    def __init__(self, child: _Child, connection: socket.socket, source: Bytes) -> None:
        self._child = child
        self._connection = connection
        self._source = source.data

    def move(self, piece: int, count: int, pushes: int) -> tuple[float, float]:
        total = piece * count * pushes
        before = time.process_time() + self._child.ask("cpu")
        self._child.say({"do": "read", "piece": piece, "total": total})
        begun = time.perf_counter()
        at, size = 0, max(piece, 64 << 10)  # small pieces are no reason to be slow: a line has no pieces
        for _ in range(total // size):
            self._connection.sendall(self._source[at : at + size])
            at = (at + size) % (ARENA - size)
        self._child.hear()
        took = time.perf_counter() - begun
        return took, time.process_time() + self._child.ask("cpu") - before


@contextmanager
def _line(folder: Path, source: Bytes) -> Iterator[_Way]:
    with _child("receive", "line", str(_arena(folder, "line"))) as child:
        with socket.create_connection(("127.0.0.1", child.hear())) as connection:
            yield _Bare(child, connection, source)


class _Pushes(_Way):
    """A carrier's own ends, as the store uses them."""

    def __init__(self, name: str, child: _Child, target: Endpoint, arena: Bytes, source: Bytes) -> None:
        self._child = child
        self._target = target
        self._arena = arena
        self._source = source
        self.sender = sending_end(name, source, self._notify)
        self.sender.connect(target).result(DEATH_S)
        self._last: Pieces = np.zeros((0, 5), np.int64)

    def _notify(self, endpoint: Endpoint, frames: Sequence[bytes]) -> Future[None]:
        """A line over a pipe stands for the ``Notify`` call of mapped memory."""
        self._child.ask("notify")
        return no_call(endpoint, frames)

    def move(self, piece: int, count: int, pushes: int) -> tuple[float, float]:
        shapes = [_pieces(piece, count, number) for number in range(min(pushes, ARENA // (piece * count)))]
        before = time.process_time() + self._child.ask("cpu")
        begun = time.perf_counter()
        ends = [self.sender.push(self._target, shapes[number % len(shapes)], b"x" * 300) for number in range(pushes)]
        for end in ends:
            end.result(60)
        took = time.perf_counter() - begun
        self._last = shapes[(pushes - 1) % len(shapes)]
        return took, time.process_time() + self._child.ask("cpu") - before

    def check(self, piece: int, count: int) -> None:
        for _, offset, _, to, length in self._last.tolist():
            if not np.array_equal(self._arena[to : to + length], self._source[offset : offset + length]):
                raise ConfigError("bench: bytes arrived changed", param="bench")

    def transport(self) -> str:
        return self.sender.transport_used()


def _pieces(piece: int, count: int, number: int) -> NDArray[np.int64]:
    """Push ``number``: neighbours here, in reverse order there, so that no two can be joined."""
    at, i = number * piece * count, np.arange(count)
    out = np.zeros((count, 5), dtype=np.int64)
    out[:, 1], out[:, 3], out[:, 4] = at + i * piece, at + (count - 1 - i) * piece, piece
    return out


@contextmanager
def _way(name: str, folder: Path, source: Bytes) -> Iterator[_Way]:
    path = _arena(folder, name)
    with _child("receive", name, str(path)) as child:
        pushes = _Pushes(name, child, decode(child.ask("describe")), map_arena(path), source)
        try:
            yield pushes
        finally:
            pushes.sender.close()


class _Nixl(_Way):
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def move(self, piece: int, count: int, pushes: int) -> tuple[float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"piece": piece, "count": count, "pushes": pushes}) + "\n")
        self._process.stdin.flush()
        took, cpu = json.loads(self._process.stdout.readline() or "null")
        return took, cpu


@contextmanager
def _nixl(python: str, say: Say) -> Iterator[_Way | None]:
    """None where ``python`` is not given or has no NIXL."""
    if not python:
        yield None
        return
    script = str(Path(__file__).with_name("carrier_peer_nixl.py"))
    with subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            ready = process.stdout.readline().strip() == "ready"
            if not ready:
                say("nixl: did not start")
            yield _Nixl(process) if ready else None
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _figures(
    ways: dict[str, _Way], end: str, piece: int, count: int, turn_bytes: int, repeats: int, say: Say
) -> dict[str, float]:
    pushes = max(turn_bytes // (piece * count), 1)
    total = piece * count * pushes
    turns: list[dict[str, tuple[float, float]]] = []
    for _ in range(repeats + 1):
        turns.append({name: way.move(piece, count, pushes) for name, way in ways.items()})
        for way in ways.values():
            way.check(piece, count)
    turns.pop(0)  # the first one warms everybody up
    out: dict[str, float] = {}
    for name in ways:
        out[f"{name}_gbs{end}"] = total / statistics.median(turn[name][0] for turn in turns) / 1e9
        out[f"{name}_cpu_s_per_gb{end}"] = statistics.median(turn[name][1] for turn in turns) / total * 1e9
    for name in ways.keys() - {"line", "nixl"}:
        for other in ways.keys() & {"line", "nixl"}:
            ratio = statistics.median(turn[other][0] / turn[name][0] for turn in turns)
            out[f"{name}_vs_{other}{end}"] = ratio
    say(f"{piece >> 10} KiB x {count}: " + ", ".join(f"{name} {out[f'{name}_gbs{end}']:.2f}" for name in ways) + " GB/s")
    return out


def _deaths(name: str, deaths: int, say: Say) -> tuple[float | None, float | None]:
    """Milliseconds until a sender, and a receiver, know that the other was killed in the middle of pushes."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=_memory()) as folder:
        path = _arena(Path(folder), name)
        at_sender = statistics.median(_receiver_killed(name, path) for _ in range(deaths))
        noticed = [_sender_killed(name, path) for _ in range(deaths if name == "tcp" else 0)]
    at_receiver = statistics.median(noticed) if noticed else None
    say(f"{name}: peer death known after {at_sender:.1f} ms (sender), {at_receiver or float('nan'):.1f} ms (receiver)")
    return at_sender, at_receiver


def _receiver_killed(name: str, path: Path) -> float:
    source = np.ones(ARENA, np.uint8)
    with _child("receive", name, str(path)) as child:
        target = decode(child.ask("describe"))
        sender = sending_end(name, source, no_call)
        try:
            pieces = _pieces(8 * MIB, 1, 0)
            sender.push(target, pieces, b"x").result(DEATH_S)
            ends = [sender.push(target, pieces, b"x") for _ in range(200)]
            ends[4].result(DEATH_S)
            begun = time.perf_counter()
            child.process.kill()
            ends[-1].exception(DEATH_S)
            return (time.perf_counter() - begun) * 1e3
        finally:
            sender.close()


def _sender_killed(name: str, path: Path) -> float:
    view = map_arena(path)
    receiver = receiving_end(name, Region(0, str(path), ARENA, 4096), view, lambda frames: None)
    try:
        with _child("send", name) as child:
            child.say(encode(receiver.describe()))
            child.hear()
            begun = time.perf_counter()
            child.process.kill()
            while receiver.numbers()["tcp_connections"] and time.perf_counter() - begun < DEATH_S:
                time.sleep(0.000_2)
            return (time.perf_counter() - begun) * 1e3
    finally:
        receiver.idle()
        receiver.close()
