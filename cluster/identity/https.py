"""HTTPS at the gateway, and clients of ours that trust its certificate. TLS 1.2 and later."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from moonpool.core.config import SecurityConfig
from moonpool.core.errors import ConfigError
from moonpool.wire.identity import require_private

LOOK_S = 5.0
log = structlog.get_logger(__name__)


class Https:
    """The gateway's certificate, read again when its files change. ConfigError names file and fix."""

    def __init__(self, security: SecurityConfig) -> None:
        self._cert, self._key = Path(security.https_cert), Path(security.https_key)
        self._seen = self._version()
        self.context = server_context(self._cert, self._key)
        self._looking = asyncio.create_task(self._look(), name="https-files")

    async def close(self) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)

    def look(self) -> None:
        """New connections get what the files say now; where they do not do, what they said before."""
        if (found := self._version()) == self._seen:
            return
        try:
            server_context(self._cert, self._key)  # whatever is wrong with them is found in another context
            self.context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as e:
            log.error("https_files_unusable", why=str(e))
            return
        self._seen = found
        log.info("https_files_read")

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _version(self) -> list[tuple[int, int]]:
        try:
            return [(path.stat().st_mtime_ns, path.stat().st_ino) for path in (self._cert, self._key)]
        except OSError:
            return []


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """ConfigError: they cannot be read, are open to others, or do not go together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    try:
        require_private(key, "security.https_key", "make it with `moonpool certs make --https HOST`, or name another file")
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as e:
        why = (e.reason if isinstance(e, ssl.SSLError) else e.strerror) or "there is no certificate in it"
        raise ConfigError(
            f"security.https_cert: cannot use {cert} with {key}: {why}; give a certificate chain and its key "
            "as PEM files without a password",
            param="security.https_cert",
        ) from e
    return context


def https_of(security: SecurityConfig) -> Https | None:
    """None: plain HTTP. ConfigError: only one of the two files is named, or they do not do."""
    if bool(security.https_cert) != bool(security.https_key):
        missing = "https_key" if security.https_cert else "https_cert"
        raise ConfigError(f"security.{missing}: missing; HTTPS needs a certificate and its key", param=f"security.{missing}")
    return Https(security) if security.https_cert else None


def trusting(cert: str, *, names: bool = True) -> ssl.SSLContext:
    """A client's context that trusts what ``cert`` holds, beside the system's authorities.

    Not ``names``: whatever host the certificate is for. For asking a process whose certificate file this side has itself.
    """
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = names
    try:
        context.load_verify_locations(cert)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"security.https_cert: cannot read {cert} ({e}); give a PEM file", param="security.https_cert") from e
    return context
