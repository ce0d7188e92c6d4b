"""Bounds and joining of pieces, against byte by byte copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import Bug
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import Extents, coalesce, endpoint_extents, memory_extents, require_inside


@st.composite
def layouts(draw: st.DrawFn) -> Pieces:
    """Pieces between two memories and two regions of 64 bytes that overlap at neither side."""
    cells = draw(st.lists(st.integers(0, 31), unique=True, max_size=20))
    targets = draw(st.permutations(range(32)))
    if draw(st.booleans()):
        targets = list(range(32))  # long runs of neighbours
    rows = [(cell // 16, cell % 16 * 4, targets[cell] // 16, targets[cell] % 16 * 4, 4) for cell in cells]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def copy(pieces: Pieces) -> bytes:
    source = np.arange(128, dtype=np.uint8).reshape(2, 64)
    target = np.zeros((2, 64), dtype=np.uint8)
    for memory, offset, region, to, length in pieces.tolist():
        target[region, to : to + length] = source[memory, offset : offset + length]
    return target.tobytes()


@given(layouts())
def test_joined_pieces_copy_the_same_bytes_and_have_no_neighbours_left(pieces: Pieces) -> None:
    joined = coalesce(pieces)
    assert copy(joined) == copy(pieces)
    assert len(joined) <= len(pieces)
    ends = {(m, o + n, r, t + n) for m, o, r, t, n in joined.tolist()}
    assert not ends & {(m, o, r, t) for m, o, r, t, _ in joined.tolist()}


def test_neighbours_in_a_run_become_one_piece() -> None:
    pieces = np.array([[0, i * 8, 0, 100 + i * 8, 8] for i in (2, 0, 1)], dtype=np.int64)
    assert coalesce(pieces).tolist() == [[0, 0, 0, 100, 24]]


@pytest.mark.parametrize(
    "bad",
    [(0, 60, 0, 0, 5), (0, 0, 3, 60, 5), (0, -1, 0, 0, 1), (0, 0, 3, -1, 1), (1, 0, 0, 0, 1), (0, 0, 1, 0, 1), (0, 0, 0, 0, 0)],
)
def test_a_piece_that_leaves_its_memory_or_region_is_named(bad: tuple[int, ...]) -> None:
    sources = memory_extents([np.zeros(64, np.uint8)])
    regions = Extents({0: 0, 3: 1 << 40}, {0: 64, 3: 64})
    good = [0, 0, 3, 0, 64]
    require_inside(np.array([good]), sources, regions)
    with pytest.raises(Bug, match="piece 1"):
        require_inside(np.array([good, list(bad)]), sources, regions)


def test_an_endpoint_whose_addresses_do_not_match_its_regions_is_refused() -> None:
    region = Region(0, "", 64, 4096)
    with pytest.raises(Bug, match="2 addresses for 1 regions"):
        endpoint_extents(Endpoint(NodeId("b"), Incarnation(1), 1, "ucx", "x", b"", (1, 2), (region,)))
    far = Region(1 << 20, "", 64, 4096)
    with pytest.raises(Bug, match="outside"):
        endpoint_extents(Endpoint(NodeId("b"), Incarnation(1), 1, "ucx", "x", b"", (1,), (far,)))


def test_source_memory_that_is_not_flat_bytes_is_refused() -> None:
    for memory in (np.zeros((2, 2), np.uint8), np.zeros(4, np.int8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="flat contiguous"):
            memory_extents([memory])
