from __future__ import annotations

import json
import time

import pytest
from support.etcd_server import free_port

from moonpool.cluster.launch.ray_session import JOB_STOP_WAIT, job_id, join, stop_wait_s
from moonpool.cluster.models import JOB_CONFIG
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.errors import ConfigError


def at(address: str) -> Config:
    return Config(cluster=ClusterConfig(ray_address=address))


@pytest.mark.parametrize(
    ("given", "named"),
    [(json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}), "raysubmit_1"), ("{}", ""), ("no", "")],
)
def test_a_job_knows_its_submission_id(given: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_CONFIG, given)
    assert job_id() == named


def test_outside_of_a_job_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_CONFIG, raising=False)
    assert job_id() == ""


@pytest.mark.parametrize(("given", "seconds"), [(None, 3.0), ("90", 90.0), ("soon", 3.0)])
def test_how_long_a_stop_waits_is_ray_s_unless_the_job_says_otherwise(
    given: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(JOB_STOP_WAIT, raising=False)
    if given is not None:
        monkeypatch.setenv(JOB_STOP_WAIT, given)
    assert stop_wait_s() == seconds


def test_clients_outside_of_the_cluster_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"ray://head:10001 is Ray Client.*ray job submit"):
        join(at("ray://head:10001"))


def test_where_nobody_listens_it_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    address, began = f"127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot reach Ray at {address}: .*refused; start it"):
        join(at(address))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"cannot reach Ray at {address}"):
        join(at("auto"))
    assert time.monotonic() - began < 60, "Ray itself would try for minutes"


@pytest.mark.parametrize("address", ["", "head", "head:", "127.0.0.1:99999999", "127.0.0.1:-1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot reach Ray at {address or 'no address'}: .*give the head's host:port"):
        join(at(address))
