"""The file of API keys: read, checked, written whole or not at all, and followed while the gateway runs."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from moonpool.cluster.gateway.tenants.book import (
    FIELD,
    ID_CHARS,
    SALT_BYTES,
    SECRET_BYTES,
    Book,
    Keys,
    checked,
    digest,
    new_token,
    to_toml,
)
from moonpool.cluster.gateway.tenants.book import parse as parse_book
from moonpool.core.errors import ConfigError

MAX_FILE_BYTES = 8 << 20
LOOK_S = 1.0  # between two looks at whether it has changed
_OTHERS_MAY_NOT = stat.S_IWGRP | stat.S_IRWXO
_log = structlog.get_logger()

Mark = tuple[int, int, int]


def read_book(path: Path) -> Book:
    """ConfigError: not readable, open to others, too large, or not a book."""
    return _read(path)[0]


def _read(path: Path) -> tuple[Book, Mark]:
    try:
        with path.open("rb") as f:
            status = os.fstat(f.fileno())
            if status.st_mode & _OTHERS_MAY_NOT:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{FIELD}: {path} has mode {mode:04o}, open to others; run chmod 600 on it", param=FIELD)
            raw = f.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{FIELD}: cannot read {path}: {e.strerror}; make one by `moonpool keys add`", param=FIELD) from e
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{FIELD}: {path} is larger than {MAX_FILE_BYTES} bytes; is it a file of keys?", param=FIELD)
    return parse_book(raw.decode(errors="replace"), str(path)), _mark(status)


def _mark(status: os.stat_result) -> Mark:
    """Differs once what is in the file, or who may read it, was changed."""
    return status.st_ctime_ns, status.st_size, status.st_ino


def write_book(path: Path, book: Book) -> None:
    """Mode 0600, by renaming: a reader sees the old file or the new one. ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(fd, "w") as f:
                f.write(to_toml(book))
                f.flush()
                os.fsync(f.fileno())
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
    except OSError as e:
        raise ConfigError(f"{FIELD}: cannot write {path}: {e.strerror}", param=FIELD) from e


def pool_quotas(path: str) -> dict[str, int]:
    """Bytes of a store node's pool by tenant, of those that are limited; none where there is no such file on this host.

    ConfigError where there is one that is not good.
    """
    if not path or not Path(path).exists():
        return {}
    return {name: tenant.pool_bytes for name, tenant in read_book(Path(path)).tenants.items() if tenant.pool_bytes}


def edit_book(path: Path, change: Callable[[Book], dict[str, Any]]) -> Book:
    """Write what ``change`` makes of the book in ``path`` (an empty one where there is no file). One editor at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        book = checked(change(read_book(path) if path.exists() else Book()), str(path))
        write_book(path, book)
    return book


def mint() -> tuple[dict[str, str], str]:
    """What the book keeps of a new key (id, salt, hash), and what its holder is told, once."""
    id, salt = os.urandom(ID_CHARS // 2), os.urandom(SALT_BYTES)
    token = new_token(id, os.urandom(SECRET_BYTES))
    return {"id": id.hex(), "salt": salt.hex(), "hash": digest(token, salt)}, token


class FollowedKeys:
    """The keys in ``path``, read again once it has changed. A change that cannot be read leaves things as they are."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        book, mark = _read(path)
        self._mark: Mark | None = mark
        self._path = path
        self._clock = clock
        self._keys = Keys(book)
        self._look_at = clock() + LOOK_S

    def __call__(self) -> Keys:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
        return self._keys

    def _look(self) -> None:
        """One complaint about each change, also about a file that is gone."""
        try:
            mark: Mark | None = _mark(self._path.stat())
        except OSError:
            mark = None
        if mark == self._mark:
            return
        self._mark = mark
        try:
            book, self._mark = _read(self._path)
        except ConfigError as e:
            _log.warning("api keys not read again", error=str(e))
            return
        self._keys = Keys(book)
        _log.info("api keys read again", keys=len(book.keys), tenants=len(book.tenant_names))
