"""This process as a driver of Ray: of a cluster of its own, which ends with it, or of one that is there."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.cluster.models import JOB_CONFIG
from moonpool.cluster.own_host import AUTO, LOOPBACK, with_own_host
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError

LOCAL = "local"
CLIENT = "ray://"
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes: no token and no KV goes through it
JOB_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
JOB_STOP_WAIT_S = 3.0  # Ray's own
TRIES = "RAY_NUM_REDIS_GET_RETRIES"  # of Ray, to connect
CONNECT_S = 5.0
START_FIX = f"start it (`ray start --head`), give the head's host:port, or set cluster.ray_address = {LOCAL}"
TOKEN_FIX = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"


@dataclass(frozen=True, slots=True)
class Session:
    """``address``: of the Ray node that this driver is on. ``dashboard``: host:port, empty where there is none."""

    address: str
    dashboard: str


def job_id() -> str:
    """The submission id of the Ray job that this process is the entry of; empty: it is none."""
    try:
        return str(json.loads(os.environ.get(JOB_CONFIG, "{}"))["metadata"]["job_submission_id"])
    except (ValueError, KeyError, TypeError):
        return ""


def stop_wait_s() -> float:
    """How long ``ray job stop`` waits for this job's end before it kills, in seconds."""
    try:
        return float(os.environ.get(JOB_STOP_WAIT, JOB_STOP_WAIT_S))
    except ValueError:
        return JOB_STOP_WAIT_S


def start_own(config: Config, scratch: Path, cpus: float) -> Session:
    """Starts a Ray cluster of this process. Blocks."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # on loopback, one user; who joins a cluster takes its mode
    # Ray would kill our actors once the whole machine, whoever fills it, is 95 % full. Budgets are checked at start-up.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    import ray

    _quiet()
    host = with_own_host(config, LOOPBACK).cluster.host
    ray.init(
        address="local",
        namespace=config.cluster.name,
        num_cpus=cpus,
        num_gpus=None if config.cluster.ray_gpus_per_worker else 0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(scratch),
        _node_ip_address=host,
    )
    return Session(host, "")


def join(config: Config, *, namespace: str | None = None) -> Session:
    """Joins the Ray cluster that ``cluster.ray_address`` names. Blocks. ConfigError names what is wrong and the fix.

    ``namespace``: of the actors it makes; None: of its own.
    """
    address = config.cluster.ray_address
    if address.startswith(CLIENT):
        raise ConfigError(
            f"cluster.ray_address: {address} is Ray Client, whose drivers are outside of the cluster; give the head's "
            "host:port, or submit a job (`ray job submit -- moonpool up ...`) with cluster.ray_address = auto",
            param="cluster.ray_address",
        )
    _require_listener(address)
    os.environ.setdefault(TRIES, "5")  # a second each; something listens there
    import ray

    _quiet()
    try:
        context = ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as e:
        if _refuses_token(e):
            raise ConfigError(
                f"cluster.ray_address: Ray at {address} refuses the token of this process, or asks for one; {TOKEN_FIX}",
                param="cluster.ray_address",
            ) from e
        raise ConfigError(
            f"cluster.ray_address: cannot join Ray at {address}: {_first_line(e)}; {START_FIX}", param="cluster.ray_address"
        ) from e
    return Session(ray.util.get_node_ip_address(), context.dashboard_url or "")


def _require_listener(address: str) -> None:
    """ConfigError, soon, where nobody answers: Ray itself would try for minutes."""
    where = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    if address == AUTO and where in ("", AUTO):
        return  # Ray looks for one on this machine
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as e:  # the last two: no port
        raise ConfigError(
            f"cluster.ray_address: cannot reach Ray at {where or 'no address'}: {e}; {START_FIX}", param="cluster.ray_address"
        ) from e


def _refuses_token(error: BaseException) -> bool:
    one: BaseException | None = error
    while one is not None:
        if "Unauthenticated" in str(one) or "authentication token" in str(one).lower():
            return True
        one = one.__cause__ or one.__context__
    return False


def _quiet() -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Ray puts the actor's own traceback into its error; the cause stands last."""
    lines: list[str] = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


async def resolved(reference: Any) -> Any:
    return await reference
