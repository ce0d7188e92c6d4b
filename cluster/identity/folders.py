"""Where each process's certificate is (``security.tls``), and taking it as this process's own.

auto    STATE/tls/ca is the authority, STATE/tls/MEMBER a process's files; whoever starts processes makes and renews them
files   TLS_DIR/MEMBER where that folder exists, else TLS_DIR: given by somebody else, who renews them
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from moonpool.cluster.identity.authority import LIFE, Authority, utc_now
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.principal import IDENTITY, Party, Principal
from moonpool.wire.identity import Certificate, Identity

FOLDER = "tls"
AUTHORITY = "ca"  # no member has this name: members are called after their roles
OPERATOR, LAUNCHER, REGISTRY = Party.OPERATOR.value, Party.LAUNCHER.value, Party.REGISTRY.value


def folder_of(config: Config, member: str) -> Path | None:
    """``member``'s folder; None: TLS is off. ``config`` carries absolute paths."""
    match config.security.tls:
        case "off":
            return None
        case "auto":
            return Path(config.cluster.state_dir) / FOLDER / member
        case "files":
            given = Path(config.security.tls_dir)
            return given / member if (given / member).is_dir() else given


def authority_folder(config: Config) -> Path:
    return Path(config.cluster.state_dir) / FOLDER / AUTHORITY


def make_for(config: Config, processes: Iterable[tuple[Party, str]]) -> None:
    """``tls = auto``: certificates for ``processes``, good for a day. Nothing otherwise. ConfigError."""
    if config.security.tls != "auto":
        return
    now = utc_now()
    authority = Authority.open(authority_folder(config), config.cluster.name, now)
    for party, member in processes:
        folder = folder_of(config, member)
        assert folder is not None
        authority.issue(folder, Principal(config.cluster.name, party, member), LIFE, now)


def take(config: Config, member: str) -> None:
    """From now on channels and ports of this process are ``member``'s; plain where TLS is off. ConfigError with the fix."""
    folder = folder_of(config, member)
    if folder is not None:
        require_good(folder, config.cluster.name)
    os.environ[IDENTITY] = str(folder or "")


def take_operator(config: Config, kept: str = "") -> None:
    """As ``take``, for a command. ``kept``: the folder that a cluster which runs here has for it, if it has."""
    if kept:
        require_good(Path(kept), config.cluster.name)
        os.environ[IDENTITY] = kept
    else:
        take(config, OPERATOR)


def require_good(folder: Path, cluster: str) -> Certificate:
    """What the certificate in ``folder`` says. ConfigError where it does not do: another cluster's, expired, unreadable."""
    says = Identity.read(folder).says
    if says.principal.cluster != cluster:
        raise ConfigError(
            f"security.tls: the certificate in {folder} is of the cluster {says.principal.cluster!r}, this one is {cluster!r}; "
            "give its own (`moonpool certs make`), or the right cluster.name",
            param="security.tls",
        )
    if says.left_s(utc_now()) <= 0:
        raise ConfigError(
            f"security.tls: the certificate in {folder} expired at {says.ends:%Y-%m-%d %H:%M} UTC; "
            f"`moonpool certs renew {folder}`, or start the cluster anew",
            param="security.tls",
        )
    return says
