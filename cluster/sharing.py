"""How the computing workers of one host share its cores: threads of each, and whether they take turns.

Two teams of OpenMP threads on the same cores destroy each other, whoever's turn it is: idle threads of one spin for a while.
So with PyTorch's kernels each of several workers has a thread of its own and no turns. The compiled backend's threads sleep
between steps: there everybody has all cores, in turns (``core.permit``).
"""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.cluster.control_group import Group, control_group
from moonpool.core.config import Config
from moonpool.core.ids import Role
from moonpool.engine.permit import permit_folder

OWN_THREADS = "compiled"  # the backend whose threads are its own
ENOUGH_CORES = 4  # for each worker: then nobody feels the others


def cores(group: Group | None = None) -> int:
    """That this process may run on, or has time for: threads beyond a container's quota only wait for one another."""
    own = len(os.sched_getaffinity(0))
    quota = (group or control_group()).cores
    return own if quota is None else max(1, min(own, int(quota)))


def computing(config: Config) -> int:
    """Workers with an engine in the whole layout: a host has all of them, or others limit what each may use."""
    return sum(node.prefill + node.decode + node.both for node in config.cluster.nodes)


def torch_threads(config: Config, role: Role) -> int:
    """Of PyTorch's kernels, in each rank of a worker."""
    everything = role is Role.BOTH or config.engine.permit == "on"
    return config.engine.threads or (max(1, cores() // config.engine.tensor_parallel) if everything else 1)


def own_threads(config: Config, role: Role) -> int:
    """Of the backend that has threads of its own."""
    alone = role is not Role.BOTH and config.engine.permit == "off"
    return config.engine.threads or (1 if alone else cores())


def takes_turns(config: Config, backend: str) -> bool:
    """Whether a worker with this backend asks for its host's compute permit."""
    if config.engine.permit != "auto":
        return config.engine.permit == "on"
    return backend == OWN_THREADS and not config.engine.threads and computing(config) > 1


def advice(config: Config, here: int) -> str | None:
    """For whoever starts a whole cluster on one machine of ``here`` cores, where another layout answers sooner."""
    split = any(node.prefill for node in config.cluster.nodes) and any(node.decode for node in config.cluster.nodes)
    workers = computing(config)
    if not split or config.engine.threads or here >= ENOUGH_CORES * workers:
        return None
    return f"{workers} workers share {here} cores; on one machine `moonpool up --role both` answers sooner"


def turns(config: Config) -> str:
    """A name for the cores that a worker takes turns with, the same for all that do so with it; empty: it takes no turns.

    ``config`` as ``decided``. Workers of one kernel may be in containers with cores and a folder of their own.
    """
    if config.engine.permit != "on":
        return ""
    folder = permit_folder(config.state_dir(Path.home()))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError:  # who takes the first turn there says what is wrong
        return ""
    return f"{folder.name}-{found.st_dev:x}-{found.st_ino:x}"


def decided(config: Config, backend: str) -> Config:
    """With ``engine.permit`` on or off."""
    permit = "on" if takes_turns(config, backend) else "off"
    return config.model_copy(update={"engine": config.engine.model_copy(update={"permit": permit})})
