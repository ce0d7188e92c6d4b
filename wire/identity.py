"""The files that say who this process is: a folder with the cluster's CA, this process's certificate and its key.

Names are ``ca.pem``, ``cert.pem`` and ``key.pem``, or ``ca.crt``, ``tls.crt`` and ``tls.key`` as in a Kubernetes secret.
They are read anew at every connection, so that files which were replaced count without a restart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from moonpool.core.errors import ConfigError
from moonpool.core.principal import IDENTITY, Principal

NAMES = (("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key"))
FIELD = "security.tls"
REMEDY = "make it with `moonpool certs make`, or name another folder"
MAX_BYTES = 256 << 10  # of one file
ATTEMPTS = 3  # files may be replaced between the reading of two of them


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says."""

    principal: Principal
    begins: datetime
    ends: datetime

    def left_s(self, now: datetime) -> float:
        """Seconds until it expires; negative: since then."""
        return (self.ends - now).total_seconds()


@dataclass(frozen=True, slots=True)
class Identity:
    """``ca``, ``cert`` and ``key`` in PEM; ``cert`` may be a chain, its own first."""

    ca: bytes
    cert: bytes
    key: bytes
    says: Certificate

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """ConfigError naming file and fix, where one is missing, can be read by others, or does not fit the others."""
        for _ in range(ATTEMPTS - 1):
            try:
                return cls._read(folder)
            except ConfigError:
                continue
        return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> Identity:
        ca, cert, key = (folder / name for name in names_in(folder))
        require_private(key)
        trusted, shown, secret = _bytes(ca), _bytes(cert), _bytes(key)
        _load(ca, trusted)
        own = _load(cert, shown)
        _require_pair(own, secret, cert, key)
        return cls(trusted, shown, secret, _says(own, cert))

    def __repr__(self) -> str:  # the key is nobody's business
        return f"Identity({self.says.principal.uri})"


def current_folder() -> Path | None:
    """Where this process's identity is; None: it has none, and its channels are plain."""
    named = os.environ.get(IDENTITY, "")
    return Path(named) if named else None


def version(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Changes whenever a file of ``folder`` was replaced, or who may read it."""
    found = []
    for name in names_in(folder):
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        found.append((stat.st_ctime_ns, stat.st_ino, stat.st_size))
    return tuple(found)


def read_certificate(path: Path) -> Certificate:
    """ConfigError where ``path`` is no certificate of a process of a cluster."""
    return _says(_load(path, _bytes(path)), path)


def names_in(folder: Path) -> tuple[str, str, str]:
    """CA, certificate, key: as they are called in ``folder``."""
    return next((names for names in NAMES if (folder / names[1]).exists()), NAMES[0])


def require_private(key: Path, field: str = FIELD, remedy: str = REMEDY) -> None:
    """ConfigError where others than the owner can read ``key`` (a group may where it is not ours: mounted secrets).

    ``field`` names it; ``remedy``: what to do where it cannot be read at all.
    """
    try:
        found = key.stat()
    except OSError as e:
        raise _unreadable(key, e, field, remedy) from e
    forbidden = 0o077 if found.st_uid == os.geteuid() else 0o037
    if found.st_mode & forbidden:
        mode = found.st_mode & 0o777
        raise ConfigError(f"{field}: {key} has mode {mode:04o}, others can read it; `chmod 600 {key}`", param=field)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as f:
            text = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise _unreadable(path, e) from e
    if len(text) > MAX_BYTES:
        raise ConfigError(f"security.tls: {path} is larger than {MAX_BYTES} bytes; it is no PEM file of certificates")
    return text


def _unreadable(path: Path, error: OSError, field: str = FIELD, remedy: str = REMEDY) -> ConfigError:
    return ConfigError(f"{field}: cannot read {path}: {error.strerror}; {remedy}", param=field)


def _load(path: Path, text: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(text)
    except ValueError as e:
        raise ConfigError(f"security.tls: {path} is no certificate in PEM form; make it with `moonpool certs make`") from e


def _says(certificate: x509.Certificate, path: Path) -> Certificate:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    if not uris:
        raise ConfigError(
            f"security.tls: {path} has no URI moonpool://CLUSTER/PARTY/MEMBER among its alternative names; "
            "make it with `moonpool certs make`"
        )
    return Certificate(Principal.parse(uris[0]), certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def _require_pair(certificate: x509.Certificate, key: bytes, cert_path: Path, key_path: Path) -> None:
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError) as e:
        raise ConfigError(f"security.tls: {key_path} is no private key in PEM form without a password") from e
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"security.tls: {key_path} is not the key of {cert_path}; put both there together")
