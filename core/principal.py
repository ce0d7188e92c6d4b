"""Who a certificate speaks for: ``moonpool://CLUSTER/PARTY/MEMBER`` in its subject alternative names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.errors import ConfigError
from moonpool.core.ids import checked_name

IDENTITY = "MOONPOOL_IDENTITY"  # of the environment: the folder of this process's files; empty or not there: none

_URI = re.compile(r"moonpool://([^/]+)/([^/]+)/([^/]+)\Z")
_FORM = "moonpool://CLUSTER/PARTY/MEMBER"


class Party(StrEnum):
    """Every role of a cluster, and who looks after one."""

    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    CONDUCTOR = "conductor"
    GATEWAY = "gateway"
    REGISTRY = "registry"
    LAUNCHER = "launcher"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Principal:
    """``member``: the member id of a process of the cluster; a name of its own for whoever is none."""

    cluster: str
    party: Party
    member: str

    @classmethod
    def parse(cls, uri: str) -> Principal:
        """ConfigError where ``uri`` is not of this form."""
        match = _URI.match(uri)
        if match is None or match[2] not in [party.value for party in Party]:
            parties = ", ".join(party.value for party in Party)
            raise ConfigError(f"certificate: {uri!r} names nobody; its URI has to be {_FORM}, PARTY one of {parties}")
        checked_name(match[1], "certificate: cluster")
        return cls(match[1], Party(match[2]), checked_name(match[3], "certificate: member"))

    @property
    def uri(self) -> str:
        return f"moonpool://{self.cluster}/{self.party.value}/{self.member}"

    @property
    def server_name(self) -> str:
        """The DNS name that every server of the cluster shows: ports are dynamic, and hosts many."""
        return server_name(self.cluster)

    def __str__(self) -> str:
        return self.member if self.member == self.party.value else f"{self.member} ({self.party.value})"


def server_name(cluster: str) -> str:
    return f"{cluster}.moonpool"
