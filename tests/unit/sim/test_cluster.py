from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.sim.cluster import Fault, bundled_clusters, read_cluster
from moonpool.sim.costs import Noise, compute_s, prefill_s, tokens_left


@pytest.mark.parametrize("name", bundled_clusters())
def test_bundled_clusters_are_sound(name: str) -> None:
    cluster = read_cluster(name)
    layout = cluster.model.layout(cluster.model.layers)
    assert layout.token_bytes == cluster.model.kv_bytes_per_token == cluster.model.layout(1).token_bytes
    assert len(cluster.nodes) == sum(group.count for group in cluster.groups)


def test_counts_and_keys_are_overruled_and_checked() -> None:
    cluster = read_cluster("llama70b_8p8d", {"link.bytes_per_s": "3e9", "keep": "decode"}).resized(prefill=5)
    assert list(cluster.nodes)[:6] == ["p0", "p1", "p2", "p3", "p4", "d0"]
    assert (cluster.link.bytes_per_s, cluster.keep) == (3e9, "decode")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"keep": "nowhere"}, "keep"),
        ({"prefill.a": "-1"}, "prefill.a"),
        ({"prefil.a": "1"}, "prefil"),
        ({"keep.at": "1"}, "keep is not a table"),
    ],
    ids=["value", "range", "unknown-key", "no-table"],
)
def test_a_wrong_key_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster("llama70b_8p8d", overrides)


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama70b_8p8d"):
        read_cluster("nowhere")
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        read_cluster(tmp_path / "broken.toml")


def test_faults_name_nodes_and_links_two_of_them() -> None:
    cluster = read_cluster("llama70b_8p8d")
    with pytest.raises(ValueError, match="'p9' is no node"):
        cluster.changed(faults=(Fault(kind="worker", node="p9", at_s=1),))
    with pytest.raises(ValueError, match="other: name"):
        Fault(kind="link", node="p0", at_s=1)
    with pytest.raises(ValueError, match="not after"):
        Fault(kind="store", node="p0", at_s=1, until_s=1)


def test_the_fitted_prefill_cost_is_that_of_the_published_bars() -> None:
    cost = read_cluster("llama70b_8p8d").prefill
    assert prefill_s(cost, 8 * 1024, 0) == pytest.approx(1.016, abs=1e-3)
    assert prefill_s(cost, 128 * 1024, 0) == pytest.approx(27.206, abs=1e-2)
    assert prefill_s(cost, 128 * 1024, int(0.95 * 128 * 1024)) == pytest.approx(2.352, abs=5e-3)


def test_tokens_left_are_those_that_take_the_time_left() -> None:
    cost = read_cluster("llama70b_8p8d").prefill
    for begin in (0, 1, 4_096, 29_999):
        assert tokens_left(cost, 30_000, compute_s(cost, begin, 30_000)) == pytest.approx(30_000 - begin, abs=1)


def test_noise_is_drawn_from_its_seed() -> None:
    draws = [[Noise(0.2, seed).factor() for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert Noise(0.0, 1).factor() == 1.0
