"""What a process and the doctor say about certificates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster.identity.authority import utc_now
from moonpool.core.errors import ConfigError
from moonpool.wire.identity import Certificate, Identity, current_folder, names_in, read_certificate

WORD, LEFT, LIFE = "certificate", "certificate_left_s", "certificate_life_s"


@dataclass(frozen=True, slots=True)
class Shown:
    """``says`` is None where ``trouble`` tells why it is of no use."""

    folder: Path
    says: Certificate | None
    trouble: str = ""


def own_certificate() -> tuple[dict[str, float], dict[str, str]]:
    """Gauges and word of this process's certificate; nothing where it has none."""
    folder = current_folder()
    if folder is None:
        return {}, {}
    try:
        says = read_certificate(folder / names_in(folder)[1])
    except ConfigError as e:
        return {}, {WORD: e.message}
    numbers = {LEFT: round(says.left_s(utc_now()), 1), LIFE: says.left_s(says.begins)}
    return numbers, {WORD: f"until {says.ends:%Y-%m-%d %H:%M} UTC"}


def shown(folder: Path) -> Shown:
    try:
        return Shown(folder, Identity.read(folder).says)
    except ConfigError as e:
        return Shown(folder, None, e.message)


def folders_below(folder: Path) -> Iterator[Path]:
    """``folder`` itself and its folders, where there is a certificate."""
    for one in (folder, *sorted(path for path in folder.glob("*") if path.is_dir())):
        if (one / names_in(one)[1]).exists():
            yield one
