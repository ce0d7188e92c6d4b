from __future__ import annotations

from pathlib import Path

import pytest
from support.etcd_server import EtcdServer

from moonpool.cli.doctor import check_registry
from moonpool.core.config import ClusterConfig, Config


@pytest.mark.processes
def test_the_doctor_says_whether_etcd_answers(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        config = Config(cluster=ClusterConfig(name="red", registry=f"etcd://127.0.0.1:{etcd.port}"))
        finding = check_registry(config)
        assert (finding.grade, finding.fix) == ("ok", "")
        assert f"etcd://127.0.0.1:{etcd.port}/moonpool/red answers; members it knows: 0" in finding.what
    finding = check_registry(config)
    assert (finding.grade, finding.fix) == ("fail", "start etcd")
    assert "does not answer" in finding.what
