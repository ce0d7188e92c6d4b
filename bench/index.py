"""The conductor's prefix index: matching, following events, memory; beside Dynamo's radix tree.

    match_8k_us, match_128k_us      prompts of 8,192 and 131,072 tokens in 16-token blocks, 64 holders, a million entries:
                                    a quarter of each is held by everybody, the rest by one
    miss_8k_us                      a prompt nobody holds
    updates_blocks_per_s            events of 32 blocks, stored and some evicted again, in batches of 16
    snapshot_blocks_per_s           one holder's snapshot, loaded by parts
    snapshot_part_us                the longest time that one part takes
    bytes_per_block_64, _512        memory a block takes at so many nodes, keys and tables included, where every second
                                    chain of 32 blocks is held by one node, the others by two to four, some of those on SSD
                                    only, and one in fifty by half of all nodes
    bytes_per_block                 the larger of the two
    dynamo_match_8k_us, ...         the peer's, where its interpreter is given
    peer                            "not given", or what could be compared

Times are medians; each has its 99th percentile beside it (``_p99_us``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from moonpool.bench.dynamo_side import DYNAMO, ask_dynamo
from moonpool.bench.timing import microseconds, timed
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation
from moonpool.scheduler.prefix_index import PrefixIndex

LIFE = Incarnation(1)
HOLDERS = 64
PROMPTS = {"8k": 512, "128k": 8_192}  # blocks of 16 tokens
EVENT_BLOCKS, BATCH_EVENTS = 32, 16
CHAIN = 32
PART = 8_000  # entries of a snapshot loaded at once, as the conductor does
Keys = tuple[bytes, ...]


def index(*, entries: int = 1_000_000, rounds: int = 2_000, peer_python: str = "") -> dict[str, Any]:
    """Medians in microseconds, with their 99th percentiles."""
    out: dict[str, Any] = {"entries": entries}
    for name, blocks in PROMPTS.items():
        out |= _match(name, blocks, entries, rounds)
    out |= _updates(entries) | _snapshot(entries)
    for nodes in (64, 512):
        out[f"bytes_per_block_{nodes}"] = _bytes_per_block(nodes, entries)
    out["bytes_per_block"] = max(out["bytes_per_block_64"], out["bytes_per_block_512"])
    settings = {"holders": HOLDERS, "entries": entries, "rounds": rounds, "prompts": PROMPTS}
    theirs = ask_dynamo(peer_python, "index", settings)
    return {**out, **theirs, "peer": DYNAMO if theirs else "not given"}


def _keys(draw: random.Random, count: int) -> Keys:
    raw = draw.randbytes(16 * count)
    return tuple(raw[16 * i : 16 * i + 16] for i in range(count))


def _stored(keys: Keys, tier: Tier = Tier.G2) -> BlockEvent:
    return BlockEvent(BlockChange.STORED, tier, keys)


def _match(name: str, blocks: int, entries: int, rounds: int) -> dict[str, float]:
    draw = random.Random(blocks)
    shared, own = _keys(draw, blocks // 4), blocks - blocks // 4
    prompts = [_keys(draw, own) for _ in range(max(entries // own, 1))]
    found = PrefixIndex(Tier.G2)
    for at in range(HOLDERS):
        found.apply(EventBatch(f"n{at}", LIFE, 1, (_stored(shared), *map(_stored, prompts[at::HOLDERS]))))
    asked = [shared + prompt for prompt in prompts]
    missing = _keys(draw, blocks)
    out = timed(f"match_{name}", lambda i: found.match(asked[i % len(asked)]), rounds)
    return out if name != "8k" else out | timed("miss_8k", lambda _: found.match(missing), rounds)


def _updates(entries: int) -> dict[str, float]:
    """Every fourth event is followed by the eviction of one stored eight events before."""
    draw, found, told, number = random.Random(2), PrefixIndex(Tier.G2), 0, [1] * HOLDERS
    batches = []
    for at in range(entries // (EVENT_BLOCKS * BATCH_EVENTS)):
        holder, events = at % HOLDERS, []
        for i in range(BATCH_EVENTS):
            events.append(_stored(_keys(draw, EVENT_BLOCKS)))
            if i % 4 == 3 and i > 8:
                events.append(BlockEvent(BlockChange.REMOVED, Tier.G2, events[i - 8].keys))
        batches.append(EventBatch(f"n{holder}", LIFE, number[holder], tuple(events)))
        number[holder] += len(events)
        told += len(events) * EVENT_BLOCKS
    begun = time.process_time()
    for batch in batches:
        found.apply(batch)
    return {"updates_blocks_per_s": told / (time.process_time() - begun)}


def _snapshot(entries: int) -> dict[str, float]:
    snapshot = IndexSnapshot("n0", LIFE, 1, ((Tier.G2, _keys(random.Random(3), entries)),))
    found = PrefixIndex(Tier.G2)
    parts = [microseconds(lambda: found.load(snapshot, PART))]
    while len(found) < entries:
        parts.append(microseconds(lambda: found.load_more(PART)))
    return {"snapshot_blocks_per_s": entries / sum(parts) * 1e6, "snapshot_part_us": max(parts)}


def _bytes_per_block(nodes: int, entries: int) -> float:
    found, number = PrefixIndex(Tier.G2), [1] * nodes
    for chain, holders in _chains(nodes, entries // CHAIN):
        for holder, tier in holders:
            found.apply(EventBatch(f"n{holder}", LIFE, number[holder], (_stored(chain, tier),)))
            number[holder] += 1
    return found.memory_bytes() / len(found)


def _chains(nodes: int, count: int) -> Iterator[tuple[Keys, Sequence[tuple[int, Tier]]]]:
    """Chains and who holds them, where."""
    draw = random.Random(nodes)
    for at in range(count):
        several = nodes // 2 if at % 50 == 0 else 1 + at % 2 * draw.randint(1, 3)
        holders = draw.sample(range(nodes), several)
        tiers = (Tier.G3 if i and draw.random() < 0.3 else Tier.G2 for i in range(several))
        yield _keys(draw, CHAIN), list(zip(holders, tiers, strict=True))
