from __future__ import annotations

import pytest

from moonpool.cluster.identity.exposure import require_unexposed
from moonpool.cluster.own_host import address_towards, on_this_host, with_own_host
from moonpool.core.config import ClusterConfig, Config, GatewayConfig
from moonpool.core.errors import ConfigError

AUTO = Config(cluster=ClusterConfig(host="auto", probe_host="auto"), gateway=GatewayConfig(host="auto"))


def test_auto_becomes_the_address_wherever_it_stands_and_nothing_else_changes() -> None:
    there = with_own_host(AUTO, "10.0.0.7")
    assert (there.cluster.host, there.cluster.probe_host, there.gateway.host) == ("10.0.0.7",) * 3
    assert with_own_host(Config(), "10.0.0.7") == Config()
    mixed = Config(cluster=ClusterConfig(host="auto"), gateway=GatewayConfig(host="0.0.0.0"))
    assert with_own_host(mixed, "10.0.0.7").gateway.host == "0.0.0.0"


def test_a_process_by_itself_takes_the_address_on_the_way_to_its_registry() -> None:
    for registry in ("127.0.0.1:2379", "etcd://127.0.0.1:2379,10.9.9.9:2379/prefix"):
        assert address_towards(registry) == "127.0.0.1"
        named = AUTO.model_copy(update={"cluster": AUTO.cluster.model_copy(update={"registry": registry})})
        assert on_this_host(named).cluster.host == "127.0.0.1"
    assert on_this_host(Config()) == Config(), "nothing to find out"


def test_without_a_way_to_the_registry_the_fix_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.host: auto .* give an address of this machine"):
        on_this_host(AUTO)


def test_plain_control_ports_off_loopback_stay_refused_once_auto_is_known() -> None:
    assert len(require_unexposed(with_own_host(AUTO, "127.0.0.3"))) == 0
    with pytest.raises(ConfigError, match="allow_plain"):
        require_unexposed(with_own_host(AUTO, "10.0.0.7"))
