"""Where etcd is and which of its keys are this cluster's: ``etcd://host:port,host:port/prefix``; ``etcds://``: by TLS. Pure.

PREFIX/CLUSTER/lives/MEMBER   the newest life of a name, its liveness and the proof: the truth, changed by comparing
PREFIX/CLUSTER/beats/MEMBER   there as long as that life's lease is renewed
PREFIX/CLUSTER/leaders/MODEL  that group's leading conductor, there as long as its lease is renewed
PREFIX/CLUSTER/term           the newest term of leadership
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote

from moonpool.cluster.etcd.access import NOBODY, Access
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId

SCHEME, SECURE_SCHEME = "etcd://", "etcds://"
DEFAULT_PREFIX = "/moonpool"

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)*\Z")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """``endpoints``: host:port each, names or addresses. ``prefix`` begins every key of the cluster, without a last slash.

    ``secure``: by TLS.
    """

    endpoints: tuple[str, ...]
    prefix: str
    secure: bool = False
    access: Access = NOBODY

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """ConfigError names what is wrong with ``text``."""
        secure = text.startswith(SECURE_SCHEME)
        where, _, query = text.removeprefix(SECURE_SCHEME if secure else SCHEME).partition("?")
        hosts, slash, path = where.partition("/")
        access = Access.parse(query)
        if access.files and not secure:
            raise _wrong(text, "certificates are of use by TLS only")
        prefix = f"{slash}{path}".rstrip("/")
        endpoints = tuple(host.strip() for host in hosts.split(","))
        for endpoint in endpoints:
            match = _ENDPOINT.match(endpoint)
            if match is None or not 0 < int(match[2]) < 65_536:
                raise _wrong(text, f"{endpoint!r} is not host:port")
        if not _PREFIX.match(prefix):
            raise _wrong(text, f"{prefix!r} is not a key prefix of letters, digits, '.', '_', '-' and '/'")
        return cls(endpoints, prefix or DEFAULT_PREFIX, secure, access)

    def __str__(self) -> str:
        query = f"?{self.access}" if str(self.access) else ""
        return f"{SECURE_SCHEME if self.secure else SCHEME}{','.join(self.endpoints)}{self.prefix}{query}"

    def of_cluster(self, name: str) -> EtcdAddress:
        return replace(self, prefix=f"{self.prefix}/{name}")

    @property
    def everything(self) -> bytes:
        """Every key of the cluster begins so."""
        return f"{self.prefix}/".encode()

    @property
    def lives(self) -> bytes:
        return f"{self.prefix}/lives/".encode()

    @property
    def beats(self) -> bytes:
        return f"{self.prefix}/beats/".encode()

    def leader(self, model: str) -> bytes:
        """``model`` is any text: what could be no part of a key is escaped."""
        return f"{self.prefix}/leaders/{quote(model, safe='')}".encode()

    @property
    def term(self) -> bytes:
        return f"{self.prefix}/term".encode()

    def life(self, member: MemberId) -> bytes:
        return self.lives + member.encode()

    def beat(self, member: MemberId) -> bytes:
        return self.beats + member.encode()


def is_etcd(registry: str) -> bool:
    return registry.startswith((SCHEME, SECURE_SCHEME))


def registry_of(config: Config) -> str:
    """The registry as every process of the cluster is told: in etcd the keys of this cluster alone. Empty: embedded."""
    named, access = config.cluster.registry, Access.of(config.security)
    if not is_etcd(named):
        return named
    address = EtcdAddress.parse(named)
    if str(access):
        address = EtcdAddress.parse(str(replace(address, access=access)))  # checked together
    return str(address.of_cluster(config.cluster.name))


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"cluster.registry: {text!r}: {why}; write etcd://host:port[,host:port...][/prefix], or etcds://... for TLS",
        param="cluster.registry",
    )
