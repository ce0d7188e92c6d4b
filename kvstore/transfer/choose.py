"""Which carrier goes between two nodes, and the sending end for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import psutil

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.core.membership import Member
from moonpool.kvstore.transfer.carrier import Sender
from moonpool.kvstore.transfer.segment import Notify, SegmentSender
from moonpool.kvstore.transfer.tcp_sender import TcpSender

MakeSender = Callable[[str, Member, TransferConfig, Notify], Sender]


def carrier_for(config: TransferConfig, here: NodeId, there: NodeId) -> str:
    """``segment`` within a node, ``ucx`` between nodes (also on one machine), unless the configuration names one.

    ConfigError where the one it names cannot reach.
    """
    if config.carrier == "auto":
        return "segment" if here == there else "ucx"
    if config.carrier == "segment" and here != there:
        raise ConfigError(
            f"transfer.carrier: 'segment' does not reach from node {here} to node {there}; use 'auto' or 'ucx'",
            param="transfer.carrier",
        )
    return config.carrier


def make_sender(carrier: str, member: Member, config: TransferConfig, notify: Notify) -> Sender:
    """ConfigError for a carrier that has no sending end of its own between processes."""
    if carrier == "segment":
        return SegmentSender(config, notify)
    if carrier == "ucx":
        from moonpool.kvstore.transfer.ucx_sender import UcxSender

        return UcxSender(member, config)
    if carrier == "tcp":
        return TcpSender(member, config)
    raise ConfigError(
        f"transfer.carrier: {carrier!r} works inside one process only; use 'auto', 'ucx' or 'segment'", param="transfer.carrier"
    )


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
