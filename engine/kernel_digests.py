"""Which files of compiled kernels are as they were written. Numba ends on a broken one, and would run a flipped bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from moonpool.core.parsing import read_json

log = logging.getLogger(__name__)

_NOTE = ".digests"
_LAST = b"."  # byte of a whole file

Facts = dict[str, list[int | str]]  # of each file: bytes, nanoseconds of its last change, digest


def drop_damaged(folder: Path) -> None:
    """Removes files that a crash cut short, and those whose bytes are not the noted ones; notes the rest. OSError.

    What is missing numba compiles. A file of another size or time than noted is one that numba wrote anew.
    """
    noted, found = _noted(folder), Facts()
    for file in folder.glob("*/*.nb[ci]"):
        with suppress(FileNotFoundError):  # another process compiles
            raw, facts = _read(file)
            name = str(file.relative_to(folder))
            before = noted.get(name, facts)
            if raw.endswith(_LAST) and (before == facts or before[:2] != facts[:2]):
                found[name] = facts
            else:
                log.warning("%s is damaged: it is compiled anew", file)
                file.unlink()
    if found != noted:
        _write(folder, found)


def _read(file: Path) -> tuple[bytes, list[int | str]]:
    with file.open("rb") as f:
        raw, stat = f.read(), os.fstat(f.fileno())
    return raw, [stat.st_size, stat.st_mtime_ns, hashlib.blake2b(raw, digest_size=16).hexdigest()]


def _noted(folder: Path) -> Facts:
    """Nothing where there is no note that can be read."""
    try:
        raw = read_json((folder / _NOTE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {name: facts for name, facts in raw.items() if isinstance(facts, list)} if isinstance(raw, dict) else {}


def _write(folder: Path, found: Facts) -> None:
    fresh = folder / f"{_NOTE}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps(found))
        fresh.replace(folder / _NOTE)
    finally:
        fresh.unlink(missing_ok=True)
