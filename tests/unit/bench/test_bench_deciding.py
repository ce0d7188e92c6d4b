"""What the conductor's measurements promise, on little data."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from moonpool.bench import hash as hashing
from moonpool.bench import index, placement
from moonpool.core.errors import ConfigError


def promised(module: ModuleType) -> set[str]:
    """First words of the docstring's indented lines, but for those of a peer and of what is no number."""
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("    ") and line[4] != " "]
    names = {name.strip() for line in lines for name in line.strip().split("  ")[0].split(",")}
    return {name for name in names if name[:1].isalpha() and not name.startswith(("dynamo", "peer"))}


def test_the_index_is_measured_in_every_way_that_is_promised() -> None:
    found = index.index(entries=20_000, rounds=20)
    assert {"match_8k_us", "miss_8k_us", "match_128k_us", "updates_blocks_per_s", "bytes_per_block"} <= promised(index)
    assert promised(index) <= found.keys()
    assert all(found[name] > 0 for name in promised(index))
    assert found["peer"] == "not given"


def test_a_block_takes_little_memory_on_few_and_on_many_nodes() -> None:
    found = index.index(entries=20_000, rounds=20)
    assert max(found["bytes_per_block_64"], found["bytes_per_block_512"]) == found["bytes_per_block"] < 160


def test_hashing_is_measured_in_every_way_that_is_promised() -> None:
    found = hashing.hash_blocks(rounds=5)
    assert {"hash_8k_us", "hash_128k_us", "hash_8k_16_us", "hash_128k_16_us", "hash_suffix_8k_us"} == promised(hashing)
    assert promised(hashing) <= found.keys()


def test_placements_are_measured_at_each_size_with_their_policy() -> None:
    found = placement.placement(nodes=(4, 8), rounds=20, policy="local_min_ttft", admission="none")
    assert found["policy"] == "local_min_ttft"
    assert found["place_4_us"] > 0 and found["place_8_us"] > 0


def test_an_interpreter_without_the_peer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot run Dynamo: ModuleNotFoundError"):
        hashing.hash_blocks(rounds=2, peer_python=sys.executable)
