"""What is in the files that ``Access`` names: credentials for one connection to etcd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.core.errors import ConfigError
from moonpool.wire.identity import MAX_BYTES, require_private


@dataclass(frozen=True, slots=True)
class Login:
    """``credentials`` None: without TLS. ``user``: name and password, where etcd has users."""

    credentials: grpc.ChannelCredentials | None = None
    user: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def read(cls, address: EtcdAddress) -> Login:
        """ConfigError naming the value, the file and the fix."""
        access, credentials = address.access, None
        if address.secure:
            credentials = grpc.ssl_channel_credentials(
                _text(access.ca, "etcd_ca") or None,
                _text(access.key, "etcd_key", private=True) or None,
                _text(access.cert, "etcd_cert") or None,
            )
        password = _text(access.password_file, "etcd_password_file", private=True).decode(errors="replace").strip()
        if access.user and not password:
            raise ConfigError(f"security.etcd_password_file: {access.password_file} is empty; write the password into it")
        return cls(credentials, (access.user, password) if access.user else None)

    def dial(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Blocking calls (see ``stream``). The one channel that is not to a process of ours."""
        if self.credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, self.credentials, options=options)


def _text(path: str, name: str, *, private: bool = False) -> bytes:
    if not path:
        return b""
    try:
        if private:
            require_private(Path(path), f"security.{name}", "name another file")
        with open(path, "rb") as f:
            return f.read(MAX_BYTES)
    except OSError as e:
        raise ConfigError(
            f"security.{name}: cannot read {path}: {e.strerror}; name another file", param=f"security.{name}"
        ) from e
