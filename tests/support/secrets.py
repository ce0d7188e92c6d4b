"""Looks for what nobody may read in what everybody may: logs, output, command lines, environments."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


def forms(secret: bytes) -> set[bytes]:
    """As bytes, hexadecimal and both kinds of base64; of a PEM file, each of its lines."""
    if secret.startswith(b"-----BEGIN"):
        return {line for line in secret.splitlines() if len(line) > 16 and not line.startswith(b"-----")}
    coded = {base64.b64encode(secret).rstrip(b"="), base64.urlsafe_b64encode(secret).rstrip(b"=")}
    return {secret, secret.hex().encode(), secret.hex().upper().encode(), *coded}


def private_keys(folder: Path) -> list[Path]:
    """Files below ``folder`` with a private key in PEM form."""
    return [path for path in sorted(folder.rglob("*.pem")) if b"PRIVATE KEY" in path.read_bytes()]


def told_of(process: psutil.Process) -> Iterator[tuple[str, bytes]]:
    """Command lines and environments of a process and all below it."""
    for one in [process, *process.children(recursive=True)]:
        for name in ("cmdline", "environ"):
            try:
                yield f"{name} of {one.pid}", Path(f"/proc/{one.pid}/{name}").read_bytes()
            except OSError:  # it ended meanwhile
                continue


def found_in(places: Iterable[tuple[str, bytes]], secrets: dict[str, bytes]) -> list[str]:
    """``secret in place`` for every one that shows."""
    wanted = {name: forms(secret) for name, secret in secrets.items()}
    return [
        f"{name} in {place}" for place, text in places for name, looks in wanted.items() if any(look in text for look in looks)
    ]
