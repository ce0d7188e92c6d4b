"""What to scrape: every process's probe port, as Prometheus reads it for ``file_sd_configs``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moonpool.core.membership import Liveness, Member, MemberChange

EVERYWHERE = ("0.0.0.0", "[::]", "::")


def targets(known: Iterable[MemberChange], cluster: str) -> list[dict[str, Any]]:
    """One group per process that may come back to life; ``instance`` is its name, so that it stays over its restarts."""
    return [
        {"targets": [address], "labels": {"instance": change.member.id, "cluster": cluster}}
        for change in known
        if change.liveness is not Liveness.GONE and (address := _address(change.member))
    ]


def _address(member: Member) -> str:
    """Where the probe listens on all addresses, the one that the process announces for its control port."""
    host, _, port = member.details.get("probe", "").rpartition(":")
    if host in EVERYWHERE:
        host = member.address.rpartition(":")[0]
    return f"{host}:{port}" if host else ""
