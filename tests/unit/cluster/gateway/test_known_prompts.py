from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.cluster.gateway import known_prompts
from moonpool.cluster.gateway.known_prompts import KnownPrompts
from moonpool.core.blocks import BlockHasher

HASHER = BlockHasher(bytes(32), bytes(16), 16)
IDS = random.Random(1).choices(range(50_000), k=3 * 1_024 + 40)


class Counting(BlockHasher):
    """Adds up the bytes that were hashed."""

    hashed = 0

    def add_keys(self, known: object, raw: bytes) -> list[bytes]:
        self.hashed += len(raw) // 64 * 64
        return super().add_keys(known, raw)  # type: ignore[arg-type]


def test_only_what_a_known_conversation_adds_is_hashed() -> None:
    known, hasher = KnownPrompts(), Counting(bytes(32), bytes(16), 16)
    assert known.keys(hasher, IDS[:2_100]) == HASHER.keys(IDS[:2_100])
    assert hasher.hashed == 2_096 * 4
    hasher.hashed = 0
    assert known.keys(hasher, IDS) == HASHER.keys(IDS)
    assert hasher.hashed == (3_104 - 2_048) * 4
    assert len(known) == 3


def test_the_same_tokens_after_others_or_in_another_namespace_are_not_mistaken() -> None:
    known = KnownPrompts()
    first = known.keys(HASHER, IDS[:1_024])
    other = BlockHasher(bytes(32), b"another space...", 16)
    assert known.keys(other, IDS[:1_024]) == other.keys(IDS[:1_024]) != first
    twice = IDS[:1_024] * 2
    assert known.keys(HASHER, twice) == HASHER.keys(twice)
    wide = BlockHasher(bytes(32), bytes(16), 64)
    assert known.keys(wide, twice) == wide.keys(twice)


def test_what_was_used_longest_ago_is_forgotten() -> None:
    known, hasher = KnownPrompts(most=2), Counting(bytes(32), bytes(16), 16)
    prompts = [[n] * 1_024 for n in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        known.keys(hasher, prompt)
    hasher.hashed = 0
    known.keys(hasher, prompts[0])
    assert (hasher.hashed, len(known)) == (0, 2)
    known.keys(hasher, prompts[1])
    assert hasher.hashed == 4_096


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=12), st.sampled_from([1, 4, 9, 16]), st.integers(1, 9))
def test_keys_are_the_same_whatever_was_asked_before(prompts: list[list[int]], size: int, most: int) -> None:
    hasher, known = BlockHasher(bytes(32), bytes(16), size), KnownPrompts(most)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(known_prompts, "STRIDE_TOKENS", 8)
        for prompt in prompts:
            assert known.keys(hasher, prompt) == hasher.keys(prompt)
            assert len(known) <= most
