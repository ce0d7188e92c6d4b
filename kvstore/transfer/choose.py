"""Which carrier goes between two nodes, and the ends for it.

Over TCP, plain sockets move small pieces two to three times as fast as UCX and large ones no slower, so UCX is the better
choice only over RDMA.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.core.membership import Member
from moonpool.kvstore.sealing.keys import KvKey
from moonpool.kvstore.transfer.carrier import Endpoint, OnNotices, Receiver, Sender
from moonpool.kvstore.transfer.sealable import require_sealable
from moonpool.kvstore.transfer.segment import Notify, SegmentSender
from moonpool.kvstore.transfer.tcp_receiver import TcpReceiver
from moonpool.kvstore.transfer.tcp_sender import TcpSender

MakeSender = Callable[[str, Member, TransferConfig, Notify], Sender]
NoticesOf = Callable[[str], OnNotices]
"""Who takes the frames that arrive by the carrier of this name."""
MakeReceivers = Callable[[TransferConfig, Member, NoticesOf], Sequence[Receiver]]

DEVICES = Path("/sys/class/infiniband")
WITHIN_A_HOST = frozenset({"tcp", "self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem"})


def carriers_for(
    config: TransferConfig, here: NodeId, there: NodeId, devices: Path = DEVICES, *, sealed: bool = False
) -> tuple[str, ...]:
    """What a writer on node ``here`` can use to node ``there``, best first; the target answers with the first it has.

    ``sealed``: KV bytes between nodes are encrypted. ConfigError where the one that the configuration names cannot reach,
    or cannot be sealed.
    """
    if sealed:
        require_sealable(config)
    if config.carrier == "auto":
        if here == there:
            return ("segment",)
        if sealed:
            return ("tcp",)
        return ("ucx", "tcp") if rdma_usable(config, devices) else ("tcp", "ucx")
    if config.carrier == "segment" and here != there:
        raise ConfigError(
            f"transfer.carrier: 'segment' does not reach from node {here} to node {there}; use 'auto', 'tcp' or 'ucx'",
            param="transfer.carrier",
        )
    return (config.carrier,)


def reaching(config: TransferConfig, carriers: Sequence[str], address: str) -> tuple[str, ...]:
    """``carriers`` without UCX where it is refused to the node at ``address``. ConfigError where nothing else is left."""
    if "ucx" not in carriers:
        return tuple(carriers)
    try:
        require_transport(config, address)
    except ConfigError:
        left = tuple(one for one in carriers if one != "ucx")
        if not left:
            raise
        return left
    return tuple(carriers)


def pick(carriers: Sequence[str], offered: Sequence[Endpoint]) -> Endpoint:
    """The endpoint of the best of ``carriers`` among those a target offers. ConfigError, naming both, where none is."""
    for carrier in carriers:
        for endpoint in offered:
            if endpoint.carrier == carrier:
                return endpoint
    raise nothing_shared(carriers, [endpoint.carrier for endpoint in offered], offered[0].node if offered else NodeId("?"))


def nothing_shared(carriers: Sequence[str], offered: Sequence[str], node: NodeId) -> ConfigError:
    return ConfigError(
        f"transfer.carrier: the writer can use {', '.join(carriers) or 'none'}, "
        f"node {node} has {', '.join(offered) or 'none'}; set both to 'auto' or to the same one",
        param="transfer.carrier",
    )


def rdma_usable(config: TransferConfig, devices: Path = DEVICES) -> bool:
    """Whether there is an RDMA device and UCX may use it (``UCX_TLS``, else ``transfer.ucx_tls``)."""
    allowed = set(os.environ.get("UCX_TLS", config.ucx_tls).split(","))
    return any(devices.glob("*")) and not allowed <= WITHIN_A_HOST


def make_receivers(config: TransferConfig, member: Member, notices_of: NoticesOf, key: KvKey | None = None) -> list[Receiver]:
    """The ends for writers of other nodes, best first; none where only mapped segments are wanted.

    With a ``key`` only its holders can push. ConfigError for a carrier that has no receiving end of its own between
    processes, or that cannot keep others out.
    """
    return [_make_receiver(name, config, member, notices_of(name), key) for name in offered(config, sealed=key is not None)]


def offered(config: TransferConfig, devices: Path = DEVICES, *, sealed: bool = False) -> list[str]:
    """By which carriers writers of other nodes may come, best first."""
    if sealed:
        require_sealable(config)
    if config.carrier == "segment":
        return []
    if config.carrier == "memory":
        raise ConfigError("transfer.carrier: 'memory' moves bytes inside one process only; use auto", param="transfer.carrier")
    if config.carrier != "auto":
        return [str(config.carrier)]
    return ["ucx", "tcp"] if not sealed and rdma_usable(config, devices) else ["tcp"]


def _make_receiver(carrier: str, config: TransferConfig, member: Member, on_notices: OnNotices, key: KvKey | None) -> Receiver:
    if carrier == "tcp":
        return TcpReceiver(member, on_notices, key=key, port=config.port)
    if carrier == "ucx":
        from moonpool.kvstore.transfer.ucx_receiver import UcxReceiver

        return UcxReceiver(member, config, on_notices)
    if carrier == "ucxx":
        from moonpool.kvstore.transfer.ucxx_receiver import UcxxReceiver

        return UcxxReceiver(member, config, on_notices)
    raise _unknown(carrier)


def make_sender(carrier: str, member: Member, config: TransferConfig, notify: Notify, key: KvKey | None = None) -> Sender:
    """ConfigError for a carrier that has no sending end of its own between processes."""
    if carrier == "segment":
        return SegmentSender(config, notify)
    if carrier == "tcp":
        return TcpSender(member, config, key=key)
    if carrier == "ucx":
        from moonpool.kvstore.transfer.ucx_sender import UcxSender

        return UcxSender(member, config)
    if carrier == "ucxx":
        from moonpool.kvstore.transfer.ucxx_sender import UcxxSender

        return UcxxSender(member, config)
    if carrier == "memory":
        raise ConfigError(
            "transfer.carrier: 'memory' works inside one process only; use 'auto', 'tcp', 'ucx' or 'segment'",
            param="transfer.carrier",
        )
    raise _unknown(carrier)


def _unknown(carrier: str) -> ConfigError:
    return ConfigError(f"transfer.carrier: {carrier!r} is not there; use 'auto', 'tcp' or 'ucx'", param="transfer.carrier")


def require_transport(config: TransferConfig, address: str) -> None:
    """ConfigError where ``address`` (host:port) is on this machine and UCX might reach it by more than TCP.

    What counts is the environment; the configured value is put there, where it has none, before UCX reads it.
    """
    tls = os.environ.get("UCX_TLS", config.ucx_tls)
    if tls != "tcp" and is_this_machine(address.rpartition(":")[0]):
        raise ConfigError(
            f"transfer.ucx_tls: {tls!r} between two node ids on one machine; set it to 'tcp' there. UCX's shared-memory "
            "lanes write into the target without its help, so making its endpoint anew would prove nothing",
            param="transfer.ucx_tls",
        )


def is_this_machine(host: str) -> bool:
    """Whether ``host`` (name or address) is one of this machine's own addresses. A name that is not known is not."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    own = {address.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(str(one).startswith("127.") or one in own for one in found)
