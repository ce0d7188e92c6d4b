"""Hashing a prompt's token ids into block keys, beside Dynamo's block hashes.

    hash_8k_us, hash_128k_us          8,192 and 131,072 tokens in 64-token blocks, from a list of Python ints
    hash_8k_16_us, hash_128k_16_us    in 16-token blocks
    hash_suffix_8k_us                 one block more than a known session's 8,192 tokens, 64-token blocks
    dynamo_hash_8k_us, ...            the peer's, in 16-token blocks
    peer                              "not given", or what could be compared

Times are medians; each has its 99th percentile beside it (``_p99_us``).
"""

from __future__ import annotations

import random
from typing import Any

from moonpool.bench.dynamo_side import DYNAMO, ask_dynamo
from moonpool.bench.timing import timed
from moonpool.core.blocks import HASH_KEY_BYTES, KEY_BYTES, BlockHasher

LENGTHS = {"8k": 8_192, "128k": 131_072}
VOCABULARY = 150_000


def hash_blocks(*, rounds: int = 200, peer_python: str = "") -> dict[str, Any]:
    """Medians in microseconds; ``rounds`` of the short prompt, a tenth as many of the long one."""
    hasher = {size: BlockHasher(bytes(HASH_KEY_BYTES), bytes(KEY_BYTES), size) for size in (64, 16)}
    out: dict[str, Any] = {}
    draw = random.Random(1)
    for name, tokens in LENGTHS.items():
        ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        turns = rounds if name == "8k" else max(rounds // 10, 3)
        out |= timed(f"hash_{name}", lambda _, ids=ids: hasher[64].keys(ids), turns)  # type: ignore[misc]
        out |= timed(f"hash_{name}_16", lambda _, ids=ids: hasher[16].keys(ids), turns)  # type: ignore[misc]
    ids = [draw.randrange(VOCABULARY) for _ in range(LENGTHS["8k"] + 64)]
    known = hasher[64].keys(ids[:-64])
    out |= timed("hash_suffix_8k", lambda _: hasher[64].keys(ids, known=known), rounds)
    theirs = ask_dynamo(peer_python, "hash", {"rounds": rounds, "lengths": LENGTHS, "block": 16, "vocabulary": VOCABULARY})
    return {**out, **theirs, "peer": DYNAMO if theirs else "not given"}
