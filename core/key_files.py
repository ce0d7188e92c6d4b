"""Files that hold one 32-byte key of the cluster: the hash key of block names, the key of KV bytes."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from moonpool.core.errors import ConfigError

KEY_FILE_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def load_key(path: Path, param: str) -> bytes:
    """The key in ``path``; the first start makes it (mode 0600). Safe when several start at once.

    ConfigError naming ``param``: it cannot be read or made, or holds something else.
    """
    try:
        if not path.exists():
            _make(path, os.urandom(KEY_FILE_BYTES))
        raw = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{param}: cannot read or make {path}: {e.strerror}; give a writable path", param=param) from e
    if len(raw) != KEY_FILE_BYTES:
        raise ConfigError(
            f"{param}: {path} holds {len(raw)} bytes, {KEY_FILE_BYTES} needed; remove it to make a new one", param=param
        )
    return raw


def keep_key(path: Path, key: bytes, param: str) -> None:
    """``key`` in ``path`` (mode 0600), where there is none yet. ConfigError naming ``param`` where it cannot be made."""
    try:
        if not path.exists():
            _make(path, key)
    except OSError as e:
        raise ConfigError(f"{param}: cannot make {path}: {e.strerror}; give a writable path", param=param) from e


def require_private(path: Path, param: str) -> None:
    """ConfigError where others than its owner may read or write the file; its group may read what is not ours: a mount."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & (OTHERS if found.st_uid == os.geteuid() else OTHERS & ~stat.S_IRGRP):
        raise ConfigError(f"{param}: {path} has mode {mode:04o}, others may use it; chmod 600 it", param=param)


def key_id(key: bytes, kind: str) -> str:
    """A public name of a key: 16 hex digits that tell nothing about it. ``kind`` keeps keys of different use apart."""
    return hashlib.blake2b(f"moonpool {kind} id".encode() + key, digest_size=8).hexdigest()


def _make(path: Path, key: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    with os.fdopen(fd, "wb") as f:
        f.write(key)
    try:
        os.link(fresh, path)  # atomic: the first one wins, the others read it
    except FileExistsError:
        pass
    finally:
        os.unlink(fresh)
