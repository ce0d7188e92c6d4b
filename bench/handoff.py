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
FREE, THROTTLED = "prefill-0", "prefill-1"  # two writers: a sending end's throttle is fixed
Run = dict[str, Any]
Say = Callable[[str], None]


def handoff(
    carrier: str = "ucx",
    model: str = "smollm2",
    *,
    repeats: int = 3,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, a side that does not start, a push that fails."""
    if carrier not in ("ucx", "segment"):
        raise ConfigError(f"carrier: {carrier!r} does not join two processes; use ucx or segment", param="carrier")
    if repeats < 1:
        raise ConfigError(f"repeats: {repeats} is too few; use 1 or more", param="repeats")
    model_dir = local_model(model, say)
    machine = machine_facts()
    with _sides(carrier, model_dir) as sides:
        return {"model": model, **_measure(sides, repeats, say), "machine": machine}


def _measure(sides: _Sides, repeats: int, say: Say) -> dict[str, Any]:
    say("warming up")
    sides.run(TOKENS, FREE)
    free = [sides.run(TOKENS, FREE) for _ in range(repeats)]
    prefill_s = statistics.median(_prefill_ns(one) for one in free) / 1e9
    say(f"prefill of {TOKENS} tokens: {prefill_s * 1e3:.0f} ms; exposed {_exposed(free):.4f} of it")
    rate = TOKENS * sides.token_bytes / (0.5 * prefill_s)
    throttled = [sides.run(TOKENS, THROTTLED, rate) for _ in range(repeats)]
    say(f"throttled to {rate / 1e6:.0f} MB/s: exposed {_exposed(throttled):.4f}")
    bulk = [sides.run(TOKENS, THROTTLED, rate, layered=False) for _ in range(repeats)]
    say(f"pushed afterwards: exposed {_exposed(bulk):.4f}")
    overhead = {n: sides.run(n, FREE)["bytes"] / (n * sides.token_bytes) for n in (*LENGTHS, SHORT)}
    return {
        "exposed_fraction": _exposed(throttled),
        "exposed_fraction_bulk": _exposed(bulk),
        "exposed_fraction_unthrottled": _exposed(free),
        "exposed_ms": statistics.median(map(_exposed_ns, throttled)) / 1e6,
        "exposed_unthrottled_ms": statistics.median(map(_exposed_ns, free)) / 1e6,
        "prefill_ms": prefill_s * 1e3,
        "push_layer_us": statistics.median(us for one in free for us in one["push_us"]),
        "wire_overhead": max(overhead[n] for n in LENGTHS),
        **{f"wire_overhead_{n}": value for n, value in overhead.items()},
        "carrier": free[0]["carrier"],
        "transport": sides.transport(),
        "throttle_bytes_per_s": rate,
        "samples": {
            name: [_exposed_ns(one) / _prefill_ns(one) for one in runs]
            for name, runs in (("throttled", throttled), ("bulk", bulk), ("unthrottled", free))
        },
    }


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
        return str(self._store.hear()["words"].get("ucx_transport", "mmap"))


@contextmanager
def _sides(carrier: str, model_dir: Path) -> Iterator[_Sides]:
    given = {
        "model_dir": str(model_dir),
        "carrier": carrier,
        "ucx_net_devices": "lo" if carrier == "ucx" else "",
        "writers": [FREE, THROTTLED],
        "writer_node": "a" if carrier == "ucx" else "b",
        "pages": 40,
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
