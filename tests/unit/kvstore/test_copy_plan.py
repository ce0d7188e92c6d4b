"""What goes where: decaying counts of reads, and the order in which a leaving node copies."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moonpool.core.ids import NodeId
from moonpool.kvstore.replication.heat import DECAY_S, Heat
from moonpool.kvstore.replication.plan import Block, Room, least_to_move, most_room, path_to, pieces


def tree(seed: int, n: int) -> list[Block]:
    """Parents before children, at random."""
    rng, out = random.Random(seed), list[Block]()
    for i in range(n):
        parent = rng.choice(out).key if out and rng.random() < 0.8 else None
        out.append(Block(b"%d" % i, parent, rng.random(), 10))
    return out


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 8), st.floats(0, 1))
def test_every_block_that_is_nowhere_else_is_in_one_piece_after_its_parent_and_under_its_whole_path(
    seed: int, n: int, most: int, share: float
) -> None:
    blocks = tree(seed, n)
    rng = random.Random(seed)
    elsewhere = {block.key for block in blocks if rng.random() < share}
    parents = {block.key: block.parent for block in blocks}
    found = pieces(blocks, elsewhere, most)
    copied = [key for piece in found for key in piece.keys]
    assert sorted(copied) == sorted(parents.keys() - elsewhere)
    for piece in found:
        assert 0 < len(piece.keys) <= most
        assert piece.path == path_to(piece.keys[-1], parents)
        assert piece.path[-len(piece.keys) :] == piece.keys
    for i, key in enumerate(copied):
        parent = parents[key]
        assert parent is None or parent in elsewhere or parent in copied[:i]


def test_the_hottest_sequence_goes_first_and_a_cold_parent_is_as_hot_as_its_child() -> None:
    cold = [Block(b"c0", None, 1.0, 10), Block(b"c1", b"c0", 1.0, 10)]
    warm = [Block(b"w0", None, 0.5, 10), Block(b"w1", b"w0", 5.0, 10), Block(b"w2", b"w0", 3.0, 10)]
    found = pieces([*cold, *warm], set(), 64)
    assert [piece.keys for piece in found] == [(b"w0", b"w1"), (b"w2",), (b"c0", b"c1")]


def test_a_path_with_a_gap_or_a_ring_is_none() -> None:
    assert path_to(b"b", {b"b": b"a"}) == ()
    assert path_to(b"b", {b"b": b"a", b"a": b"b"}) == ()


def test_a_copy_goes_where_least_has_to_move_or_where_most_room_is() -> None:
    size = dict.fromkeys((b"a", b"b", b"c"), 10)
    empty = Room(NodeId("empty"), 1000, 0, set())
    parent = Room(NodeId("parent"), 30, 0, {b"a"})
    full = Room(NodeId("full"), 0, 30, {b"a", b"b"})
    whole = Room(NodeId("whole"), 5000, 0, {b"a", b"b", b"c"})
    path = (b"a", b"b", b"c")
    assert least_to_move([empty, parent, full, whole], path, size) is full
    full.took([], 10)
    assert (full.free, full.evictable, full.budget) == (0, 20, 10)
    full.took([], 10)
    assert least_to_move([empty, parent, full, whole], path, size) is parent, "half of what could be evicted is kept"
    assert most_room([parent, empty, whole], path, size) is empty
    assert most_room([whole], path, size) is None


def test_reads_count_per_minute_and_fade() -> None:
    heat = Heat()
    for i in range(300):
        heat.read([b"a"], i * 6.0)  # ten a minute
    assert heat.per_minute(b"a", 300 * 6.0) == pytest.approx(10, rel=0.06)
    assert heat.per_minute(b"a", 300 * 6.0 + DECAY_S) == pytest.approx(10 / math.e, rel=0.06)
    assert heat.hot([b"a", b"b"], 9, 300 * 6.0) == 1
    assert heat.hot([b"b", b"a"], 9, 300 * 6.0) == 0, "leading ones only"
    heat.forget([b"a"])
    assert heat.hot([b"a"], 1, 300 * 6.0) == 0


@given(st.integers(1, 10))
def test_as_many_reads_as_asked_for_are_hot_even_if_the_first_faded_a_little(reads: int) -> None:
    heat = Heat()
    for i in range(reads):
        assert heat.hot([b"a"], reads, i * 0.1) == 0
        heat.read([b"a"], i * 0.1)
    assert heat.hot([b"a"], reads, reads * 0.1) == 1


def test_memory_is_bounded_and_the_hot_ones_are_kept() -> None:
    heat = Heat(limit=100)
    for i in range(10_000):
        heat.read([b"%d" % i, b"hot"], float(i))
        assert len(heat) <= 102
    assert heat.per_minute(b"hot", 10_000.0) > 50
