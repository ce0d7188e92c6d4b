"""Where numba keeps compiled kernels: the user's cache folder, one subfolder per state of the code that they come from.

Numba looks only at the file that a function stands in when it decides whether what it compiled is stale, not at what that
function calls. So the folder's name has a digest of all kernel sources and of numba's version in it, and folders of former
states are removed. Import this module before numba compiles anything: every module with kernels does so first.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numba

from moonpool.engine.kernel_digests import drop_damaged
from moonpool.engine.timed_lock import TimedLock

log = logging.getLogger(__name__)

_SOURCES = ("compiled/*.py", "paged_*.py", "tensor_parallel/awaiting.py")
_KEEP_S = 7 * 86_400.0  # another version of the project may be in use beside this one
_ROOM = 64 << 20  # bytes free; all kernels take some 4 MiB
_PATIENCE_S = 300.0  # for another process that compiles: several times what it takes, and not for ever where it is frozen
_NOT_KEPT = "moonpool-kernels-"  # how folders of one process's own begin


def kernel_folder(root: Path) -> Path:
    """``root``/kernels/DIGEST; not created yet."""
    here = Path(__file__).parent
    mix = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for pattern in _SOURCES:
        for file in sorted(here.glob(pattern)):
            mix.update(file.name.encode() + b"\0" + file.read_bytes())
    return root / "kernels" / mix.hexdigest()


def user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonpool"


def use_kernel_cache(root: Path | None = None) -> Path:
    """Make numba keep kernels below ``root`` (default: the user's cache folder); returns the folder.

    Cached kernels are code, and pickled: a folder that somebody else may write is not used, nor one that this user may not,
    nor one on a full disk. Then kernels live in a folder of this process's own, and every start compiles them.
    """
    try:
        folder = kernel_folder(root or user_folder())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder.parent)
        _require_own(folder)
        _require_room(folder)
        os.utime(folder)
        drop_damaged(folder)
        for other in folder.parent.iterdir():
            if other != folder and time.time() - other.stat().st_mtime > _KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
    except (OSError, RuntimeError) as e:  # RuntimeError: a user without a home
        folder = Path(tempfile.mkdtemp(prefix=_NOT_KEPT))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log.warning("kernels are not kept for the next start: %s", e)
    numba.config.CACHE_DIR = str(folder)
    numba.config.DISABLE_JIT = 0  # NUMBA_DISABLE_JIT makes Python of kernels, whose addresses and vectors Python does not have
    return folder


def _require_own(folder: Path) -> None:
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to somebody else or may be written by others; chmod 700 it, or remove it")


def _require_room(folder: Path) -> None:
    if shutil.disk_usage(folder).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def kept() -> bool:
    """Whether the next start finds what this process compiles."""
    return not Path(numba.config.CACHE_DIR).name.startswith(_NOT_KEPT)


def what_to_wait_for() -> str:
    """For whoever watches this process load a model; empty where kernels were compiled before."""
    folder = Path(numba.config.CACHE_DIR)
    if not kept():
        return "compiling kernels, which takes up to a minute, and does at every start: they cannot be kept, the log says why"
    if any(folder.glob("*/*.nbi")):
        return ""
    return f"compiling kernels for this CPU, which takes up to a minute; later starts find them in {folder.parent}"


@contextmanager
def compiling() -> Iterator[None]:
    """Around what may compile: of several processes that start at once one does it, and the others load what it made."""
    held, lock = False, None
    try:
        lock = TimedLock(Path(numba.config.CACHE_DIR) / ".lock")
        held = lock.acquire(_PATIENCE_S)
    except OSError as e:  # a file system without locks
        log.warning("kernels may be compiled twice: %s", e)
    try:
        yield
        with suppress(OSError):  # the next start notes it
            drop_damaged(Path(numba.config.CACHE_DIR))
    finally:
        if lock is not None:
            if held:
                lock.release()
            lock.close()


use_kernel_cache()
