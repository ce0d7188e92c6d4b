"""Which carrier goes where, and what is refused by name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.carrier_peer import who

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, NodeId
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.kvstore.transfer.choose import (
    carriers_for,
    is_this_machine,
    make_sender,
    offered,
    pick,
    reaching,
    require_transport,
)
from moonpool.kvstore.transfer.ucx import agent_name, ucx_environment

A, B = NodeId("a"), NodeId("b")


def endpoint(carrier: str) -> Endpoint:
    return Endpoint(B, Incarnation(1), 1, carrier, carrier, b"", (), ())


def carrier_for(writer: TransferConfig, there: NodeId, target: TransferConfig, writer_rdma: Path, target_rdma: Path) -> str:
    """What ``writer`` on node a and ``target`` agree on."""
    return pick(carriers_for(writer, A, there, writer_rdma), [endpoint(name) for name in offered(target, target_rdma)]).carrier


def test_the_best_carrier_that_both_ends_have_is_taken_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RDMA counts where both have it and UCX may use it; without it plain sockets are faster."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    (tmp_path / "mlx5_0").mkdir()
    rdma, none = tmp_path, tmp_path / "mlx5_0"
    auto, over_rdma = TransferConfig(), TransferConfig(ucx_tls="rc,tcp")
    assert carriers_for(auto, A, A) == ("segment",)
    assert carrier_for(auto, B, auto, none, none) == "tcp"
    assert carrier_for(auto, B, auto, rdma, rdma) == "tcp"  # UCX may use tcp only
    assert carrier_for(over_rdma, B, over_rdma, rdma, rdma) == "ucx"
    assert carrier_for(over_rdma, B, over_rdma, none, rdma) == "tcp"
    assert carrier_for(over_rdma, B, over_rdma, rdma, none) == "tcp"
    assert carrier_for(auto, B, TransferConfig(carrier="ucx"), none, none) == "ucx"
    assert carrier_for(TransferConfig(carrier="ucx"), B, over_rdma, none, rdma) == "ucx"
    assert carriers_for(TransferConfig(carrier="ucx"), A, A) == ("ucx",)
    assert carriers_for(TransferConfig(carrier="segment"), A, A) == ("segment",)
    with pytest.raises(ConfigError, match="'segment' does not reach from node a to node b"):
        carriers_for(TransferConfig(carrier="segment"), A, B)


def test_a_carrier_asked_for_by_name_that_the_target_lacks_is_an_error_naming_both_lists() -> None:
    with pytest.raises(ConfigError, match="can use ucx, node b has tcp, segment"):
        pick(["ucx"], [endpoint("tcp"), endpoint("segment")])
    with pytest.raises(ConfigError, match="can use tcp, ucx, node"):
        pick(["tcp", "ucx"], [])


def test_ucx_that_is_refused_leaves_the_other_carriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    assert reaching(TransferConfig(), ("ucx", "tcp"), "127.0.0.1:7000") == ("tcp",)
    assert reaching(TransferConfig(), ("ucx", "tcp"), "192.0.2.7:7000") == ("ucx", "tcp")
    with pytest.raises(ConfigError, match="'all'"):
        reaching(TransferConfig(), ("ucx",), "127.0.0.1:7000")


def test_a_carrier_that_stays_inside_one_process_is_no_sending_end() -> None:
    with pytest.raises(ConfigError, match="inside one process"):
        make_sender("memory", who("prefill-0", "a"), TransferConfig(), lambda endpoint, frames: None)  # type: ignore[arg-type,return-value]


def test_more_than_tcp_between_node_ids_of_one_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_transport(TransferConfig(), "127.0.0.1:7000")
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    for here in ("127.0.0.1:7000", "localhost:7000", f"{socket.gethostname()}:7000", "[::1]:7000"):
        with pytest.raises(ConfigError, match="'tcp,cma'"):
            require_transport(TransferConfig(), here)
    require_transport(TransferConfig(), "192.0.2.7:7000")  # another machine
    monkeypatch.delenv("UCX_TLS")
    with pytest.raises(ConfigError, match="'all'"):
        require_transport(TransferConfig(ucx_tls="all"), "127.0.0.1:7000")


def test_an_unknown_name_is_not_this_machine() -> None:
    assert not is_this_machine("no-such-host.invalid")


def test_the_environment_that_was_given_stays() -> None:
    config = TransferConfig(ucx_net_devices="eth0")
    assert ucx_environment(config, {})["UCX_TLS"] == "tcp"
    assert ucx_environment(config, {})["UCX_NET_DEVICES"] == "eth0"
    assert "UCX_TLS" not in ucx_environment(config, {"UCX_TLS": "rc"})
    assert "UCX_NET_DEVICES" not in ucx_environment(TransferConfig(), {})


def test_lives_differ_in_what_ucx_keeps_of_a_name() -> None:
    life = 1_764_424_106_000_000_000
    names = {agent_name("a" * 63, life + i, end, generation)[:31] for i in (0, 1) for end in "rs" for generation in (1, 12)}
    assert len(names) == 8
