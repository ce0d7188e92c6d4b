"""How much of a cached prefix is used: whole quanta only, so that nobody learns it block by block from the time a hit saves.

Whoever may share somebody's KV (tenants of one region) can tell by the time to first token whether a guessed prefix is
cached (Song et al., "The Early Bird Catches the Leak", 2024). With a quantum of q blocks a guess must be right in q blocks at
once: one token more tells nothing.
"""

from __future__ import annotations

from moonpool.core.blocks import blocks_for


def hit_quantum(min_hit_tokens: int, block_tokens: int) -> int:
    """Blocks; 1 where every block counts."""
    return max(1, blocks_for(min_hit_tokens, block_tokens))


def usable(blocks: int, quantum: int) -> int:
    """Of ``blocks`` leading blocks that are cached, those that may be used."""
    return blocks - blocks % quantum
