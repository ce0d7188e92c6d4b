"""Dynamo's KV-router core alone, for ``moonpool bench index`` and ``hash``; runs in an interpreter that has it.

``hash`` or ``index`` as the argument, settings as JSON on standard input, figures as one JSON line. Nothing of Moonpool is
imported. Keys and events are made before the clock starts.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

EVENT_BLOCKS = 32


def median_us(call: Any, rounds: int) -> float:
    taken = []
    for i in range(rounds):
        begun = time.perf_counter()
        call(i)
        taken.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(taken)


def hashes(settings: dict[str, Any]) -> dict[str, float]:
    from dynamo.llm import compute_block_hash_for_seq

    out, draw = {}, random.Random(1)
    for name, tokens in settings["lengths"].items():
        ids = [draw.randrange(settings["vocabulary"]) for _ in range(tokens)]
        rounds = settings["rounds"] if tokens < 10_000 else max(settings["rounds"] // 10, 3)
        out[f"hash_{name}_{settings['block']}_us"] = median_us(
            lambda _, ids=ids: compute_block_hash_for_seq(ids, settings["block"]), rounds
        )
    return out


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def index(settings: dict[str, Any]) -> dict[str, float]:
    """Prompts of ``blocks`` blocks, a quarter held by everybody, the rest by one worker, ``entries`` blocks in all."""
    from dynamo.llm import RadixTree

    out, draw = {}, random.Random(1)
    for name, blocks in settings["prompts"].items():
        shared = [(draw.getrandbits(63), draw.getrandbits(63)) for _ in range(blocks // 4)]
        own = [
            [(draw.getrandbits(63), draw.getrandbits(63)) for _ in range(blocks - len(shared))]
            for _ in range(max(settings["entries"] // (blocks - len(shared)), 1))
        ]
        events: list[tuple[int, bytes, int]] = []
        for worker in range(settings["holders"]):
            store(events, worker, None, shared)
        for at, chain in enumerate(own):
            store(events, at % settings["holders"], shared[-1][0], chain)
        tree, before, begun = RadixTree(), resident_bytes(), time.perf_counter()
        for worker, event, _ in events:
            tree.apply_event(worker, event)
        asked = [[tokens for _, tokens in shared + chain] for chain in own]
        tree.find_matches(asked[0])  # it works through its events on a thread of its own
        total = sum(count for _, _, count in events)
        if name == "8k":
            out["updates_blocks_per_s"] = total / (time.perf_counter() - begun)
            out["bytes_per_block"] = (resident_bytes() - before) / total
            misses = [[draw.getrandbits(63) for _ in range(blocks)] for _ in range(50)]
            out["miss_8k_us"] = median_us(lambda i, t=tree, m=misses: t.find_matches(m[i % 50]), settings["rounds"])
        out[f"match_{name}_us"] = median_us(lambda i, t=tree, a=asked: t.find_matches(a[i % len(a)]), settings["rounds"])
    return out


def store(events: list[tuple[int, bytes, int]], worker: int, parent: int | None, chain: list[tuple[int, int]]) -> None:
    for i in range(0, len(chain), EVENT_BLOCKS):
        part = chain[i : i + EVENT_BLOCKS]
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in part]
        stored = {"event_id": len(events) + 1, "dp_rank": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}
        events.append((worker, json.dumps(stored).encode(), len(part)))
        parent = part[-1][0]


if __name__ == "__main__":
    measure = {"hash": hashes, "index": index}[sys.argv[1]]
    print(json.dumps(measure(json.load(sys.stdin))))
