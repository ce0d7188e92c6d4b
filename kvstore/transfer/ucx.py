"""UCX through NIXL: its environment, its agents, and what UCX itself says about the lanes it uses.

Every call on an agent is made by the one thread that owns it. NIXL's own progress thread stays off: it spins in every
idle process. Without it nothing moves, in either direction, while the owner does not poll.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError
from moonpool.kvstore.transfer.carrier import UNKNOWN

# 0.1 ms costs about a fifth of a core while something is in flight; a spinning poll slows compute by a third on 2 cores.
SEND_POLL_S = 0.000_15
RECEIVE_POLL_S = 0.000_2


def ucx_environment(config: TransferConfig, given: Mapping[str, str]) -> dict[str, str]:
    """The variables to set before the first import of UCX; those that ``given`` (the environment) has stay as they are.

    Without an RDMA device UCX's verbs module must not be loaded: a plain process would end with SIGSEGV after its work.
    """
    wanted = {"UCX_TLS": config.ucx_tls, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"}
    if config.ucx_net_devices:
        wanted["UCX_NET_DEVICES"] = config.ucx_net_devices
    if not any(Path("/sys/class/infiniband").glob("*")):
        wanted["UCX_MODULES"] = "^ib"
    return {name: value for name, value in wanted.items() if name not in given}


def agent_name(member: str, incarnation: int, end: str, life: int) -> str:
    """A name no other life of any agent has (a survivor refuses one it still knows); ``end`` is "r" or "s".

    The parts that differ stand first: UCX keeps 31 characters of it.
    """
    return f"{incarnation:x}{end}{life}.{member}"


NewAgent = Callable[[str, TransferConfig], Any]


def new_agent(name: str, config: TransferConfig) -> Any:
    """A ``nixl_agent`` with the UCX back end. ConfigError when NIXL is absent or refuses to start."""
    os.environ.update(ucx_environment(config, os.environ))
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as e:
        raise ConfigError(f"transfer.carrier: UCX needs the package nixl-cu12 ({e})", param="transfer.carrier") from e
    sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync))
    agent.create_backend("UCX", {})
    if "UCX" not in agent.backends:
        raise ConfigError(
            f"transfer.carrier: NIXL has no UCX back end here ({agent.get_plugin_list()})", param="transfer.carrier"
        )
    return agent


def device_trouble(agent: Any, config: TransferConfig) -> str | None:
    """Why ``agent`` cannot read a GPU's memory; None where it can.

    NIXL's back end claims to know such memory whatever its UCX was built with, so UCX's own module is looked for; where that
    is missing, or not allowed, UCX would take a device's address for one of the host.
    """
    if "VRAM" not in agent.get_backend_mem_types("UCX"):
        return "NIXL's UCX knows no device memory"
    loaded = _loaded_libraries()
    if not any(any((Path(path).parent / "ucx").glob("libuct_cuda*")) for path in loaded.values()):
        return "this UCX is built without CUDA"
    allowed = os.environ.get("UCX_TLS", config.ucx_tls).split(",")
    if not any(name == "all" or name.lstrip("\\").startswith("cuda") for name in allowed):
        return f"transfer.ucx_tls {','.join(allowed)!r} allows no cuda"
    return None


def nixl_errors() -> tuple[type[Exception], ...]:
    """Everything NIXL raises (its exceptions share no base class)."""
    from nixl_cu12 import _bindings

    named = (getattr(_bindings, name) for name in dir(_bindings) if name.startswith("nixl"))
    return tuple(one for one in named if isinstance(one, type) and issubclass(one, Exception))


def collect_agent() -> None:
    """After the last reference to an agent was dropped: cycles must not keep it (and its sockets) alive."""
    gc.collect()


class _Lane(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    """``ucp_ep_attr_t`` of UCX 1.12 and later; ``mask`` says which fields the query fills."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("lanes", ctypes.POINTER(_Lane)),
        ("lane_count", ctypes.c_uint),
        ("lane_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MAX_LANES = 16
_NAME_KEPT = 31  # UCP_ENTITY_NAME_MAX - 1


def lanes_used(agent: str) -> str:
    """The transports of all endpoints of this process's agent named ``agent``, as UCX reports them ("tcp", "cma+tcp").

    UCX keeps a tree of its own objects; the agent's endpoints are found there and asked with ``ucp_ep_query``. To be
    called by the thread that owns the agent, so that none of them goes meanwhile. "unknown" where UCX has no such tree.
    """
    loaded = _loaded_libraries()
    if not {"libucs", "libucp"} <= loaded.keys():
        return UNKNOWN
    try:
        # UCX calls back under its lock: who holds the interpreter's lock and waits for UCX's, as an agent's end does, would
        # wait for ever for one that gave the interpreter's up. So it is kept.
        ucs, ucp = ctypes.PyDLL(loaded["libucs"]), ctypes.CDLL(loaded["libucp"])
        endpoints = _endpoint_addresses(ucs, agent[:_NAME_KEPT])
        found = {lane for address in endpoints for lane in _lanes_of(ucp, address)}
    except (OSError, AttributeError, ValueError):
        return UNKNOWN
    return "+".join(sorted(found)) or UNKNOWN


def lanes_of(endpoint: int) -> str:
    """As ``lanes_used``, of one endpoint of UCXX, given by its address."""
    loaded = _loaded_libraries("libucx")
    try:
        return "+".join(sorted(_lanes_of(ctypes.CDLL(loaded["libucp"]), endpoint))) or UNKNOWN
    except (OSError, AttributeError, KeyError):
        return UNKNOWN


def _loaded_libraries(owner: str = "nixl") -> dict[str, str]:
    """Path of the libucs and libucp that came with ``owner``: another UCX may be in this process too."""
    out = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rsplit(" ", 1)[-1]
        stem = Path(path).name.partition("-")[0].partition(".")[0]
        if f"/{owner}" in path and stem in ("libucs", "libucp"):
            out[stem] = path
    return out


def _endpoint_addresses(ucs: ctypes.PyDLL, context: str) -> list[int]:
    visit = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
    ucs.ucs_vfs_path_list_dir.argtypes = [ctypes.c_char_p, visit, ctypes.c_void_p]

    def entries(path: str) -> list[str]:
        out: list[str] = []
        take = visit(lambda name, _: out.append(name.decode()))
        ucs.ucs_vfs_path_list_dir(path.encode(), take, None)
        return out

    workers = f"/ucp/context/{context}/worker"
    for above in ("/", "/ucp", "/ucp/context", f"/ucp/context/{context}"):
        entries(above)  # UCX fills a folder when its parent is listed
    found = []
    for worker in entries(workers):
        entries(f"{workers}/{worker}")
        found += [int(name, 16) for name in entries(f"{workers}/{worker}/ep")]
    return found


def _lanes_of(ucp: ctypes.CDLL, endpoint: int) -> set[str]:
    ucp.ucp_ep_query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes)]
    lanes = (_Lane * _MAX_LANES)()
    ask = _EndpointAttributes(mask=_TRANSPORTS, lanes=lanes, lane_count=_MAX_LANES, lane_size=ctypes.sizeof(_Lane))
    if ucp.ucp_ep_query(endpoint, ctypes.byref(ask)) != 0:
        return set()
    return {lanes[i].transport.decode() for i in range(ask.lane_count)}
