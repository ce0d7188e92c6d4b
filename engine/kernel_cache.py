"""Where numba keeps compiled kernels: the user's cache folder, one subfolder per state of the code that they come from.

Numba looks only at the file that a function stands in when it decides whether what it compiled is stale, not at what that
function calls. So the folder's name has a digest of all kernel sources and of numba's version in it, and folders of former
states are removed. Import this module before numba compiles anything: every module with kernels does so first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import numba

_SOURCES = ("compiled/*.py", "paged_*.py")
_KEEP_S = 7 * 86_400.0  # another version of the project may be in use beside this one


def kernel_folder(root: Path) -> Path:
    """``root``/kernels/DIGEST; not created yet."""
    here = Path(__file__).parent
    mix = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for pattern in _SOURCES:
        for file in sorted(here.glob(pattern)):
            mix.update(file.name.encode() + b"\0" + file.read_bytes())
    return root / "kernels" / mix.hexdigest()


def use_kernel_cache(root: Path | None = None) -> Path:
    """Make numba keep kernels below ``root`` (default: the user's cache folder). Best effort: without it they compile again."""
    folder = kernel_folder(root or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonpool")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir():
            if other != folder and time.time() - other.stat().st_mtime > _KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return folder
    numba.config.CACHE_DIR = str(folder)
    return folder


use_kernel_cache()
