"""Finds a cluster inside a Ray cluster by the names of its actors, and stops the job that keeps it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.cluster.launch.plan import patience_s
from moonpool.cluster.launch.ray_actor import Cluster
from moonpool.cluster.launch.ray_session import Session, join
from moonpool.cluster.process import Say
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError

ASK_S = 5.0  # an actor that starts or ends does not answer: the next one is asked
POLL_S = 0.3


def find(config: Config) -> Cluster:
    """What the actors in the namespace ``cluster.name`` say of their cluster. Blocks. ConfigError where there are none."""
    with _joined(config):
        return _asked(config)


def stop(config: Config, say: Say) -> None:
    """Stops the Ray job that keeps the cluster, as ``ray job stop`` does, and waits for its end. Blocks. ConfigError."""
    from ray.job_submission import JobSubmissionClient

    with _joined(config) as session:
        cluster = _asked(config)
        if not cluster.job or not session.dashboard:
            why = "no Ray job" if not cluster.job else "and this Ray has no dashboard to ask"
            raise ConfigError(
                f"cluster.name: {config.cluster.name!r} is kept by {cluster.supervisor}, {why}; stop it there (SIGTERM)",
                param="cluster.name",
            )
        say(f"stopping Ray job {cluster.job}")
        jobs, until = JobSubmissionClient(f"http://{session.dashboard}"), time.monotonic() + patience_s(config)
        jobs.stop_job(cluster.job)
        while not (status := jobs.get_job_status(cluster.job)).is_terminal():
            if time.monotonic() > until:
                raise ConfigError(f"cluster.name: Ray job {cluster.job} does not end; see `ray job logs {cluster.job}`")
            time.sleep(POLL_S)
        say(f"Ray job {cluster.job}: {status.value.lower()}")


@contextmanager
def _joined(config: Config) -> Iterator[Session]:
    import ray

    session = join(config)
    try:
        yield session
    finally:
        ray.shutdown()


def _asked(config: Config) -> Cluster:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util import list_named_actors

    namespace = config.cluster.name
    for one in list_named_actors(all_namespaces=True):
        if one["namespace"] != namespace:
            continue
        try:
            found: Cluster = ray.get(ray.get_actor(one["name"], namespace).about.remote(), timeout=ASK_S)
            return found
        except (GetTimeoutError, RayError, ValueError):
            continue
    raise ConfigError(
        f"cluster.name: {namespace!r} does not run in Ray at {config.cluster.ray_address}; start it with "
        "`ray job submit -- moonpool up`, or name another one with --name",
        param="cluster.name",
    )
