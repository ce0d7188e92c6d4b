"""Certificates of a cluster for tests: made in a moment, for whom and for as long as a test wants."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from moonpool.cluster.identity.authority import Authority, utc_now
from moonpool.core.principal import Party, Principal

CLUSTER = "test"
HOUR = timedelta(hours=1)
OVER = timedelta(minutes=-1)  # certificates begin ten minutes ago: good once, and not now


class Certificates:
    """Everything below ``folder``."""

    def __init__(self, folder: Path, cluster: str = CLUSTER) -> None:
        self.folder, self.cluster = folder, cluster
        self.authority = Authority.open(folder / "ca", cluster, utc_now())

    def of(self, party: Party, member: str = "", life: timedelta = HOUR) -> Path:
        """The folder of whom it is made for; made anew where it is there."""
        principal = Principal(self.cluster, party, member or party.value)
        self.authority.issue(self.folder / principal.member, principal, life, utc_now())
        return self.folder / principal.member

    def https(self, *hosts: str, life: timedelta = HOUR) -> Path:
        self.authority.issue_https(self.folder / "https", hosts or ("127.0.0.1",), life, utc_now())
        return self.folder / "https"
