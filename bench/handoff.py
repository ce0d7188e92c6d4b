"""``moonpool bench handoff``: how long a request waits for its KV after the last layer was computed.

Three processes on this machine, as in a cluster: a prefill (the real engine, one thread) on node a, the store node of node
b, and a reader on node b that copies each slice into its pages as soon as the node relays it. A run grants a landing,
computes a prompt in chunks, pushes it and ends when every slice is checked and in the reader's pages: then the request is
*runnable*. ``exposed`` is the time from the moment the last layer's K and V of the last chunk are in the prefill's pages.

Keys of the result (medians over ``repeats`` runs; every run is in ``samples``):

    exposed_fraction                exposed over prefill time, 2,048 tokens, on a carrier throttled (token bucket before each
                                    post) so that the whole KV takes half of the prefill time
    exposed_fraction_bulk           the same carrier, everything pushed after the prefill: about 0.5
    exposed_fraction_unthrottled    no throttle
    exposed_ms, exposed_unthrottled_ms, prefill_ms
    push_layer_us                   what queueing one layer costs the compute thread
    wire_overhead                   bytes sent, notices included, per byte of KV needed: the larger of the next two
    wire_overhead_500, wire_overhead_2049, wire_overhead_17
    carrier, transport              what carried the bytes, and what its library says it used
    throttle_bytes_per_s, machine
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moonpool.bench.machine import machine_facts
from moonpool.cluster.models import local_model
from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError

TOKENS = 2_048
LENGTHS = (500, 2_049)
SHORT = 17
_BLOCK_TOKENS = 64
FREE = "prefill-0"
Run = dict[str, Any]
Say = Callable[[str], None]


def handoff(
    carrier: str = "ucx",
    model: str = "smollm2",
    *,
    repeats: int = 3,
    tokens: int = TOKENS,
    lengths: tuple[int, ...] = LENGTHS,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, a side that does not start, a push that fails.

    ``tokens`` are those of the timed prompts, ``lengths`` those whose overhead counts.
    """
    if carrier not in ("tcp", "ucx", "ucxx", "segment"):
        raise ConfigError(f"carrier: {carrier!r} does not join two processes; use tcp, ucx, ucxx or segment", param="carrier")
    if repeats < 1:
        raise ConfigError(f"repeats: {repeats} is too few; use 1 or more", param="repeats")
    model_dir = local_model(model, say)
    machine = machine_facts()
    with _sides(carrier, model_dir, max(tokens, *lengths), repeats) as sides:
        timed = _times(sides, tokens, repeats, say)
        return {"model": model, **timed, **_overheads(sides, lengths), "transport": sides.transport(), "machine": machine}


def _times(sides: _Sides, tokens: int, repeats: int, say: Say) -> dict[str, Any]:
    """Without a throttle, with one, and afterwards, in turns: a machine that speeds up or slows down does so for all."""
    say("warming up")
    sides.run(tokens, FREE)
    free, throttled, bulk, rates = [], [], [], []
    for repeat in range(repeats):
        free.append(sides.run(tokens, FREE))
        rates.append(tokens * sides.token_bytes / (0.5 * _prefill_ns(free[-1]) / 1e9))
        throttled.append(sides.run(tokens, _throttled(repeat), rates[-1]))
        bulk.append(sides.run(tokens, _throttled(repeat), rates[-1], layered=False))
        exposed = [_exposed([runs[-1]]) for runs in (free, throttled, bulk)]
        say(
            f"prefill {_prefill_ns(free[-1]) / 1e6:.0f} ms; exposed {exposed[0]:.4f} of it, at {rates[-1] / 1e6:.0f} MB/s "
            f"{exposed[1]:.4f}, pushed afterwards {exposed[2]:.4f}"
        )
    return {
        "exposed_fraction": _exposed(throttled),
        "exposed_fraction_bulk": _exposed(bulk),
        "exposed_fraction_unthrottled": _exposed(free),
        "exposed_ms": statistics.median(map(_exposed_ns, throttled)) / 1e6,
        "exposed_unthrottled_ms": statistics.median(map(_exposed_ns, free)) / 1e6,
        "prefill_ms": statistics.median(map(_prefill_ns, free)) / 1e6,
        "push_layer_us": statistics.median(us for one in free for us in one["push_us"]),
        "carrier": free[0]["carrier"],
        "throttle_bytes_per_s": statistics.median(rates),
        "samples": {
            name: [_exposed_ns(one) / _prefill_ns(one) for one in runs]
            for name, runs in (("throttled", throttled), ("bulk", bulk), ("unthrottled", free))
        },
    }


def _overheads(sides: _Sides, lengths: tuple[int, ...]) -> dict[str, float]:
    found = {n: sides.run(n, FREE)["bytes"] / (n * sides.token_bytes) for n in (*lengths, SHORT)}
    each = {f"wire_overhead_{n}": value for n, value in found.items()}
    return {"wire_overhead": max(found[n] for n in lengths), **each}


def _throttled(repeat: int) -> str:
    """A writer of its own: the throttle of a sending end is fixed."""
    return f"prefill-{repeat + 1}"


def _prefill_ns(run: Run) -> int:
    return int(run["ended"] - run["begun"])


def _exposed_ns(run: Run) -> int:
    return int(run["runnable"] - run["last_layer"])


def _exposed(runs: list[Run]) -> float:
    return statistics.median(_exposed_ns(one) / _prefill_ns(one) for one in runs)


class _Child:
    """One process of the measurement, asked over its pipes."""

    def __init__(self, role: str, given: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moonpool.bench.handoff_child", role, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def tell(self, command: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise ConfigError(f"bench: a process ended: {self._log.read_text(errors='replace')[-800:]}", param="bench")
        value: dict[str, Any] = json.loads(line)
        return value

    def end(self) -> None:
        """Its input ends, so it leaves in order; killed where it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class _Sides:
    """The three processes, and one run over them."""

    def __init__(self, store: _Child, prefill: _Child, reader: _Child, token_bytes: int) -> None:
        self._store, self._prefill, self._reader = store, prefill, reader
        self.token_bytes = token_bytes
        self._seed = 0

    def run(self, tokens: int, writer: str, throttle: float = 0.0, *, layered: bool = True) -> Run:
        """Instants of one prompt that was never seen before. ConfigError where its push failed."""
        self._seed += 1
        command = {"tokens": tokens, "writer": writer, "throttle": throttle, "layered": layered, "seed": self._seed}
        self._prefill.tell(command)
        self._reader.tell(self._prefill.hear())
        self._reader.hear()
        self._prefill.tell({"go": True})
        out = self._prefill.hear()
        if out["failure"] is not None:
            raise ConfigError(f"bench: a push failed: {out['failure']}", param="bench")
        return out | self._reader.hear()

    def transport(self) -> str:
        self._store.tell({})
        words = self._store.hear()["words"]
        return str(words.get("ucx_transport", "mmap" if words["carrier"] == "segment" else "tcp"))


@contextmanager
def _sides(carrier: str, model_dir: Path, tokens: int, repeats: int) -> Iterator[_Sides]:
    given = {
        "model_dir": str(model_dir),
        "carrier": carrier,
        "ucx_net_devices": "lo" if carrier in ("ucx", "ucxx") else "",
        "writers": [FREE, *map(_throttled, range(repeats))],
        "writer_node": "b" if carrier == "segment" else "a",
        "pages": -(-tokens // _BLOCK_TOKENS),
        "pool_bytes": 256 * MIB,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))

        def child(role: str, **more: Any) -> tuple[_Child, dict[str, Any]]:
            one = _Child(role, given | more, folder / f"{role}.log")
            stack.callback(one.end)
            return one, one.hear()

        store, at = child("store")
        reader, _ = child("read", **at)
        prefill, facts = child("prefill", **at)
        yield _Sides(store, prefill, reader, facts["token_bytes"])
