"""Every gRPC channel, server and port of a process is made here, so that all of them are protected, or none.

The process's identity is a folder with the CA, its certificate and its key, named by the environment variable ``IDENTITY``
(its launcher sets it, as it sets UCX's variables). With it, both ends of every connection show a certificate of the
cluster's CA, and servers refuse calls that their callers have no right to (``rights``). Without it channels are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from moonpool.core.errors import ConfigError
from moonpool.core.principal import IDENTITY
from moonpool.wire.guard import Guard
from moonpool.wire.identity import Identity, current_folder, version
from moonpool.wire.links import CLIENT, SERVER, SameProtocol
from moonpool.wire.renewed import RenewedChannel

__all__ = ["IDENTITY", "MAX_MESSAGE_BYTES", "bind", "dial", "dial_blocking", "keep_polling", "server"]

MAX_MESSAGE_BYTES = 64 << 20  # of one message that a server accepts
MAX_METADATA_BYTES = 16 << 10
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    *SERVER,
)

Options = Sequence[tuple[str, Any]]
log = structlog.get_logger(__name__)


def dial(address: str, *, options: Options = ()) -> grpc.aio.Channel:
    """A channel to ``address`` (host:port), connected at its first call. Calls fail where the identity does not do.

    Where its files do not do any more, the last ones that did go on.
    """
    keep_polling()
    folder = current_folder()
    if folder is None:
        return grpc.aio.insecure_channel(address, options=_with(*options))

    own: Identity | None = None

    def make() -> grpc.aio.Channel:
        nonlocal own
        own = _own(folder) or own
        credentials, more = _client(own)
        return grpc.aio.secure_channel(address, credentials, options=_with(*options, *more))

    return RenewedChannel(make, lambda: version(folder))


def dial_blocking(address: str, *, options: Options = ()) -> grpc.Channel:
    """As ``dial``, for callers with threads and no event loop. It keeps the certificate that it began with."""
    folder = current_folder()
    if folder is None:
        return grpc.insecure_channel(address, options=_with(*options))
    credentials, more = _client(_own(folder))
    return grpc.secure_channel(address, credentials, options=_with(*options, *more))


def server(*, options: Options = ()) -> grpc.aio.Server:
    """A server whose messages are bounded and whose callers are checked. ConfigError: the identity does not do."""
    keep_polling()
    folder = current_folder()
    guards = [] if folder is None else [Guard(Identity.read(folder).says.principal.cluster)]
    return grpc.aio.server(interceptors=[*guards, SameProtocol()], options=[*SERVER_OPTIONS, *options])


def bind(server: grpc.aio.Server, address: str) -> int:
    """Adds the port ``address`` (host:port, port 0: any one) to ``server``; its number.

    RuntimeError where it is taken; ConfigError where the identity does not do.
    """
    folder = current_folder()
    if folder is None:
        port: int = server.add_insecure_port(address)
        return port
    port = server.add_secure_port(address, _server(folder))
    return port


@functools.cache
def keep_polling() -> None:
    """gRPC's polling thread stays to the end of the process.

    Otherwise it ends with the last channel or server that is collected, whose finalizer first waits for every call that is
    still open: for ever where one was abandoned, and no signal or timeout gets through to it.
    """
    grpc.aio.init_grpc_aio()


def _with(*options: tuple[str, Any]) -> Options:
    """Each option once: of two gRPC takes either."""
    return list((dict(CLIENT) | dict(options)).items())


def _own(folder: Path) -> Identity | None:
    try:
        return Identity.read(folder)
    except ConfigError as e:
        log.error("identity_unreadable", why=e.message)
        return None


def _client(own: Identity | None) -> tuple[grpc.ChannelCredentials, Options]:
    """Who could never read its identity gets credentials that nobody of the cluster accepts: its calls fail."""
    if own is None:
        return grpc.ssl_channel_credentials(), ()
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
    return credentials, (("grpc.ssl_target_name_override", own.says.principal.server_name),)


def _server(folder: Path) -> grpc.ServerCredentials:
    """Asks for the files at every connection; where they do not do any more, the last ones that did go on."""
    first = _served(folder)

    def fetch() -> Any:
        nonlocal first
        try:
            first = _served(folder)
        except ConfigError as e:
            log.error("identity_unreadable", why=e.message)
        return first

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)


def _served(folder: Path) -> Any:
    own = Identity.read(folder)
    return grpc.ssl_server_certificate_configuration([(own.key, own.cert)], own.ca)
