"""The cluster's certificate authority: a key, its own certificate, and the certificates it signs for processes.

Keys are ECDSA P-256. A certificate names its process by URI (``core.principal``), and shows the cluster's server name; only
processes of the cluster may serve with theirs, an operator's is for calling.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moonpool.core.errors import ConfigError
from moonpool.core.principal import Party, Principal
from moonpool.wire.identity import NAMES, require_private

CA_NAME, CERT_NAME, KEY_NAME = NAMES[0]
CA_KEY_NAME = "ca.key.pem"
CA_LIFE = timedelta(days=3650)
LIFE = timedelta(days=1)  # of a member's certificate where somebody renews it
SKEW = timedelta(minutes=10)  # clocks of hosts differ
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")

PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """``folder`` holds ca.pem, which everybody may read, and ca.key.pem (0600), which signs."""

    folder: Path
    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def open(cls, folder: Path, cluster: str, now: datetime) -> Authority:
        """The authority kept in ``folder``; a new one where there is none. ConfigError: it cannot be read or written."""
        with _locked(folder):
            if not (folder / CA_KEY_NAME).exists():
                _make(folder, cluster, now)
        require_private(folder / CA_KEY_NAME)
        try:
            certificate = x509.load_pem_x509_certificate((folder / CA_NAME).read_bytes())
            key = load_pem_private_key((folder / CA_KEY_NAME).read_bytes(), password=None)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"security.tls: {folder} holds no certificate authority ({e}); remove it to make a new one"
            ) from e
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"security.tls: {folder / CA_KEY_NAME} is no ECDSA key; remove {folder} to make a new one")
        return cls(folder, certificate, key)

    def issue(self, folder: Path, principal: Principal, life: timedelta, now: datetime) -> datetime:
        """Writes the three files of ``principal`` into ``folder``; returns when they expire. A key that is there is kept.

        So a renewal replaces one file, at once: nobody ever reads a certificate without its key.
        """
        _private_folder(folder)
        key = _kept_key(folder / KEY_NAME)
        ends = min(now + life, self.certificate.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(principal.uri)]
        if principal.party is not Party.OPERATOR:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names.append(x509.DNSName(principal.server_name))
        certificate = self._signed(key, f"{principal.cluster}/{principal.member}", names, usages, now - SKEW, ends)
        _write(folder / KEY_NAME, _pem(key), 0o600)
        _write(folder / CA_NAME, self.certificate.public_bytes(Encoding.PEM), 0o644)
        _write(folder / CERT_NAME, certificate, 0o644)
        return ends

    def issue_https(self, folder: Path, hosts: Sequence[str], life: timedelta, now: datetime) -> datetime:
        """A gateway's certificate for clients that trust ca.pem: names or addresses of ``hosts``."""
        names = [_host(name) for name in hosts]
        _private_folder(folder)
        key = _kept_key(folder / KEY_NAME)
        ends = min(now + life, self.certificate.not_valid_after_utc)
        certificate = self._signed(key, hosts[0], names, [ExtendedKeyUsageOID.SERVER_AUTH], now - SKEW, ends)
        _write(folder / KEY_NAME, _pem(key), 0o600)
        _write(folder / CA_NAME, self.certificate.public_bytes(Encoding.PEM), 0o644)
        _write(folder / CERT_NAME, certificate, 0o644)
        return ends

    def _signed(
        self,
        key: PrivateKey,
        subject: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        begins: datetime,
        ends: datetime,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return builder.sign(self.key, SHA256()).public_bytes(Encoding.PEM)


def _make(folder: Path, cluster: str, now: datetime) -> None:
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    name = _name(f"{cluster}/ca {serial % 10**9:09}")  # every authority its own name: errors then say which one is wrong
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - SKEW)
        .not_valid_after(now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_only(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    _write(folder / CA_NAME, certificate, 0o644)
    _write(folder / CA_KEY_NAME, _pem(key), 0o600)


def _signs_only() -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    others = dict.fromkeys((*names, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **others)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[-64:])])  # X.509 allows no longer one


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not _HOST.fullmatch(text):
            raise ConfigError(
                f"--https: {text!r} is no host name and no address; give e.g. gateway.example, or 10.0.0.1", param="--https"
            ) from None
        return x509.DNSName(text)


def _pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _kept_key(path: Path) -> PrivateKey:
    if path.exists():
        require_private(path)
        try:
            kept = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError) as e:
            raise ConfigError(f"security.tls: {path} is no private key; remove it to make a new one") from e
        if isinstance(kept, ec.EllipticCurvePrivateKey):
            return kept
    return ec.generate_private_key(ec.SECP256R1())


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(f"security.tls: cannot make {folder}: {e.strerror}; name another folder") from e


def _write(path: Path, text: bytes, mode: int) -> None:
    """Replaces ``path`` at once, never readable by more than ``mode`` says."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
            f.write(text)
        fresh.replace(path)
    except OSError as e:
        raise ConfigError(f"security.tls: cannot write {path}: {e.strerror}; name another folder") from e


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes an authority there."""
    _private_folder(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def utc_now() -> datetime:
    return datetime.now(UTC)
