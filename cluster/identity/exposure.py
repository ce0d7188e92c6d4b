"""What a configuration lets others on the network do. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Exposure:
    """``refused``: nothing is started so."""

    what: str
    fix: str
    refused: bool


def exposures(config: Config) -> list[Exposure]:
    """Every port that others than this host reach without showing who they are, or in the clear."""
    security, host, http = config.security, config.cluster.host, config.gateway.host
    found = []
    if not is_loopback(host) and security.tls == "off":
        found.append(
            Exposure(
                f"cluster.host: {host} is no loopback address, and security.tls is off: whoever reaches it can stop the "
                "cluster, and read and change its KV",
                "set security.tls to auto or files; on a network that you trust wholly, security.allow_plain = true",
                not security.allow_plain,
            )
        )
    if not is_loopback(http):
        if not security.api_keys_file:
            found.append(
                Exposure(
                    f"gateway.host: {http} is no loopback address, and there are no API keys: whoever reaches it is served",
                    "set security.api_keys_file",
                    False,
                )
            )
            if config.gateway.console == "on":
                found.append(
                    Exposure(
                        f"gateway.console: on at {http}, without API keys: whoever reaches it sees names of requests and hosts",
                        "set security.api_keys_file, or gateway.console to auto",
                        False,
                    )
                )
        if not security.https_cert:
            found.append(
                Exposure(
                    f"gateway.host: {http} is no loopback address, and HTTP is plain: prompts, answers and keys can be read",
                    "set security.https_cert and security.https_key, or put a proxy that ends TLS before it",
                    False,
                )
            )
    return found


def require_unexposed(config: Config) -> list[str]:
    """Warnings, one line each. ConfigError for what is refused."""
    found = exposures(config)
    for one in found:
        if one.refused:
            raise ConfigError(f"{one.what}; {one.fix}", param="security.tls")
    return [f"WARNING: {one.what}; {one.fix}" for one in found]


def console_wanted(config: Config) -> bool:
    """Whether gateways have a console. ``auto``: where only this machine's users, or holders of an admin's key, can look in."""
    chosen, keys = config.gateway.console, bool(config.security.api_keys_file)
    return chosen == "on" or (chosen == "auto" and (keys or is_loopback(config.gateway.host)))


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
