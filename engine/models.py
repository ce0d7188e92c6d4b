"""From the name of a model to a Hugging Face directory on disk."""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.engine.bundled import BUNDLED, fetch_bundled
from moonpool.engine.checkpoint import require_model

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]


def resolve_model(path: str, cache: Path, progress: Progress) -> Path:
    """The directory of ``path``: a bundled name, a local directory, or a Hugging Face id; ConfigError where there is none.

    A bundled model is fetched and converted once into ``cache``; several processes may start at once, one does the work.
    """
    if path in BUNDLED:
        return _bundled(path, cache, progress)
    local = Path(path).expanduser()
    if path and local.is_dir():
        require_model(local)
        return local.resolve()
    if not _HUB_ID.match(path):
        raise ConfigError(
            f"model.path: {path!r} is no directory, no Hugging Face id (owner/name) and no bundled model "
            f"({', '.join(sorted(BUNDLED))}); use one of these",
            param="model.path",
        )
    return _from_hub(path, progress)


def _bundled(name: str, cache: Path, progress: Progress) -> Path:
    target = cache / name
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if (target / "config.json").is_file():  # another process was faster
                return target
            for left in cache.glob(f".{name}-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
            try:
                fetch_bundled(name, fresh, progress)
                fresh.chmod(0o755)
                fresh.rename(target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as e:
        raise ConfigError(
            f"model.path: cannot write {target}: {e.strerror or e}; free some space, or give a writable cache folder",
            param="model.path",
        ) from e
    progress(f"{name}: ready in {target}")
    return target


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Exclusive over processes; ends with the process, whatever ends it."""
    with file.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _from_hub(repo: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"{repo}: looking in the Hugging Face hub")
    try:
        return Path(snapshot_download(repo, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(
            f"model.path: cannot fetch {repo!r} from the Hugging Face hub ({first}); give a local model directory, "
            f"or a bundled model ({', '.join(sorted(BUNDLED))})",
            param="model.path",
        ) from e
