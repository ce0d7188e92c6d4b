"""How this side shows itself to etcd: which authority it believes, its certificate, its user. Pure.

It travels as the query of the registry's address, ``etcds://host:port/prefix?ca=FILE&user=NAME``: names of files, never what
is in them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from urllib.parse import parse_qsl, urlencode

from moonpool.core.config import SecurityConfig
from moonpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Access:
    """Files in PEM; empty: the system's authorities, no certificate, no user."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def of(cls, security: SecurityConfig) -> Access:
        """ConfigError where only one half of a pair is given."""
        own = {name: getattr(security, f"etcd_{name}") for name in _NAMES}
        return cls(**own).checked()

    @classmethod
    def parse(cls, query: str) -> Access:
        """ConfigError where ``query`` is not what ``str`` writes."""
        try:
            given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        except ValueError as e:
            raise ConfigError(f"cluster.registry: {query!r} behind the ? is no list of NAME=VALUE") from e
        unknown = sorted(set(given) - set(_NAMES))
        if unknown:
            raise ConfigError(f"cluster.registry: {unknown[0]!r} behind the ? is unknown; use {', '.join(_NAMES)}")
        return cls(**given).checked()

    def checked(self) -> Access:
        for one, other in (("cert", "key"), ("user", "password_file")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                missing = other if getattr(self, one) else one
                raise ConfigError(f"security.etcd_{missing}: missing; it goes with etcd_{one if missing == other else other}")
        return self

    def __str__(self) -> str:
        return urlencode({name: value for name, value in asdict(self).items() if value}, safe="/")

    @property
    def files(self) -> bool:
        """Whether any of it is of use with TLS only."""
        return bool(self.ca or self.cert)


NOBODY = Access()
_NAMES = tuple(field.name for field in fields(Access))
