"""``moonpool bench security``: what encryption costs, as ratios to the same thing without it, taking turns in one run.

``aes_gbs``: AES-256-GCM of one core, records of 256 KiB, in cache. ``carrier_...``: pushes of 1 MiB blocks in layer slices
of 64 KiB over the tcp carrier, both ends in this process over loopback. ``ssd_...`` and ``shared_...``: batches of 1 MiB
blocks to and from the SSD tier and a folder of the shared tier, cold memory; without ``--path`` on the temporary folder,
which may be memory. ``X_encrypted_vs_plain`` are medians of the ratios of neighbouring turns.

TTFT: clusters of one prefill and one decode worker on two nodes, started in turn with nothing on, with mutual TLS, with
KV encryption, and with both; each answers new prompts, one at a time. ``ttft_X_vs_plain`` compares medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bench.asking import AskingClient, ttft_ms
from moonpool.bench.local_cluster import SPLIT, local_cluster
from moonpool.bench.machine import machine_facts
from moonpool.bench.security_rates import Pushing, Shared, Ssd
from moonpool.cluster.models import local_model
from moonpool.core.errors import ConfigError
from moonpool.kvstore.sealing.keys import KvKey, KvKeys
from moonpool.kvstore.sealing.stream import TAG_BYTES, Stream
from moonpool.kvstore.transfer.tcp_streams import CHUNK
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import MonotonicClock

SETTINGS: dict[str, dict[str, str]] = {
    "plain": {},
    "tls": {"security.tls": "auto"},
    "encrypted": {"security.kv_encryption": "aes-gcm"},
    "tls_encrypted": {"security.tls": "auto", "security.kv_encryption": "aes-gcm"},
}
AES_S = 0.5


@dataclass(frozen=True)
class SecurityOptions:
    path: str = ""  # a folder on the disk to measure
    seconds: float = 0.5  # of one turn
    rounds: int = 6
    model: str = "smollm2"
    prompt: int = 512
    cluster_rounds: int = 2  # clusters of each setting; 0: no TTFT
    samples: int = 6  # prompts of each

    def check(self) -> None:
        if self.rounds < 1 or self.cluster_rounds < 0 or self.samples < 1 or self.seconds <= 0:
            raise ConfigError("rounds, samples and seconds: 1 or more are needed", param="rounds")
        if self.path and not Path(self.path).is_dir():
            raise ConfigError(f"--path: {self.path} is no folder; name one on the disk to measure", param="--path")


Say = Callable[[str], None]


def security(options: SecurityOptions, say: Say = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure; see the module for the keys. ConfigError: bad options, or a cluster that does not start or answer."""
    options.check()
    machine = machine_facts()
    ttft = _ttft(options, say) if options.cluster_rounds else {}
    out: dict[str, Any] = {"aes_gbs": aes_gbs(AES_S)} | ttft
    with tempfile.TemporaryDirectory(dir=options.path or None, prefix="moonpool-security-") as scratch:
        out |= asyncio.run(_rates(options, Path(scratch), say))
    out["aes_gbs_after"] = aes_gbs(AES_S)
    return out | {"prompt_tokens": options.prompt, "model": options.model, "machine": machine}


def aes_gbs(seconds: float) -> float:
    """What one core seals, in GB/s."""
    stream, data = Stream(os.urandom(32)), memoryview(bytearray(CHUNK))
    out = memoryview(bytearray(CHUNK + TAG_BYTES))
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        stream.seal_into(data, b"", out)
        done += CHUNK
    return done / (time.perf_counter() - begun) / 1e9


async def _rates(options: SecurityOptions, scratch: Path, say: Say) -> dict[str, Any]:
    keys = KvKeys(KvKey.of(os.urandom(32)))
    found: dict[str, list[float]] = {}
    for kind in (Pushing, Ssd, Shared):
        sides = {}
        for name, key in (("plain", None), ("encrypted", keys)):
            sides[name] = await kind.open(scratch / f"{kind.__name__}-{name}", key)
        try:
            for _ in range(options.rounds):
                for turn in kind.turns:
                    for name, side in sides.items():
                        found.setdefault(f"{turn}_{name}", []).append(await side.turn(turn, options.seconds))
        finally:
            for side in sides.values():
                await side.close()
        say(", ".join(f"{turn}: {_ratio(found, turn):.2f} of plain" for turn in kind.turns))
    turns = [name.removesuffix("_plain") for name in found if name.endswith("_plain")]
    figures = {f"{name}_gbs": statistics.median(rates) / 1e9 for name, rates in found.items()}
    return figures | {f"{turn}_encrypted_vs_plain": _ratio(found, turn) for turn in turns}


def _ratio(found: dict[str, list[float]], turn: str) -> float:
    pairs = zip(found[f"{turn}_encrypted"], found[f"{turn}_plain"], strict=True)
    return statistics.median(closed / plain for closed, plain in pairs)


def _ttft(options: SecurityOptions, say: Say) -> dict[str, float]:
    model_dir = local_model(options.model, say)
    taken: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for turn in range(options.cluster_rounds):
        for name, settings in SETTINGS.items():
            fixed = {"model.dtype": "bfloat16", "store.pool_bytes": "256MiB", "transfer.carrier": "tcp"}
            with local_cluster(SPLIT, model_dir, fixed | settings) as cluster:
                taken[name] += asyncio.run(_asked(cluster.url, options, turn))
            say(f"{name}: ttft {statistics.median(taken[name]):.1f} ms")
    middle = {name: statistics.median(values) for name, values in taken.items()}
    out = {f"ttft_{name}_ms": value for name, value in middle.items()}
    return out | {f"ttft_{name}_vs_plain": middle[name] / middle["plain"] for name in middle if name != "plain"}


async def _asked(url: str, options: SecurityOptions, turn: int) -> Sequence[float]:
    async with open_session(url, timeout_s=300) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), await served_model(session, url))
        answers = [await client.ask(turn * 100 + n, options.prompt, 4) for n in range(options.samples + 1)]
    return [ttft_ms(answer) for answer in answers[1:]]  # the first one warms up
