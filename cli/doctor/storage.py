"""Where bytes are to lie: the pool's memory file system, the SSD tier, the shared tier, the state folder, the model."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.core.config import GIB, Config

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
DIRECT_BYTES = 4_096


def shared_memory(config: Config) -> Iterator[Finding]:
    yield of_shared_memory(config, Path(config.store.directory or "/dev/shm"), Path("/proc/mounts"))


def of_shared_memory(config: Config, folder: Path, mounts: Path) -> Finding:
    try:
        space = shutil.disk_usage(folder)
    except OSError as e:
        return fail(f"{folder}: {e.strerror}", "set store.directory to a folder on a memory file system")
    kind = file_system(folder, mounts)
    wanted = config.store.pool_bytes * len(config.cluster.nodes)
    pools = f", {wanted / GIB:.1f} GiB of pools configured" if wanted else ""
    text = f"{folder}: {space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free{pools}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return fail(f"{folder} cannot be written", "mount it for this user, or set store.directory")
    if space.free < max(wanted, GIB):
        fix = "lower store.pool_bytes, or mount it larger (containers: --shm-size; Kubernetes: emptyDir with medium Memory)"
        return fail(text, fix)
    if kind not in MEMORY_FILE_SYSTEMS:
        return warn(
            f"{text}, but it is {kind or 'unknown'}, no memory file system", "set store.directory to one, e.g. /dev/shm"
        )
    return ok(text)


def file_system(folder: Path, mounts: Path) -> str:
    """The kind of file system that ``folder`` is on; empty: unknown."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    real = folder.resolve()
    found = [(Path(fields[1]), fields[2]) for fields in lines if len(fields) > 2]
    holding = [(where, kind) for where, kind in found if where == real or where in real.parents]
    return max(holding, key=lambda one: len(one[0].parts), default=(real, ""))[1]


def ssd(config: Config) -> Iterator[Finding]:
    if config.store.ssd_path:
        yield of_ssd(config, Path(config.store.ssd_path))


def of_ssd(config: Config, folder: Path) -> Finding:
    there = _nearest(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail(f"store.ssd_path: cannot write {there}", "name a folder on an SSD that this user can write")
    free = shutil.disk_usage(there).free
    wanted = config.store.ssd_bytes * len(config.cluster.nodes)
    text = f"store.ssd_path {folder}: {free / GIB:.1f} GiB free"
    if wanted > free:
        return fail(f"{text}, {wanted / GIB:.1f} wanted", "lower store.ssd_bytes, or name a larger file system")
    try:
        direct = direct_io(there)
    except OSError as e:
        return fail(f"{text}; writing there fails: {e.strerror}", "name another folder, or mend its file system")
    if not direct:
        fix = "name a folder on ext4 or xfs: without it every block goes through the page cache, which is memory, too"
        return warn(f"{text}; no direct I/O there", fix)
    return ok(f"{text}, direct I/O works")


def direct_io(folder: Path) -> bool:
    """Whether a block can be written and read back past the page cache. OSError: not even with it."""
    path = folder / f".moonpool-doctor-{os.getpid()}"
    block = mmap.mmap(-1, DIRECT_BYTES)  # aligned, as direct I/O wants it
    block.write(b"moonpool" * (DIRECT_BYTES // 8))
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        wrote, back = os.pwritev(fd, [block], 0), mmap.mmap(-1, DIRECT_BYTES)
        return wrote == DIRECT_BYTES and os.preadv(fd, [back], 0) == DIRECT_BYTES and back[:] == block[:]
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    finally:
        if fd >= 0:
            os.close(fd)
        path.unlink(missing_ok=True)


def shared_tier(config: Config) -> Iterator[Finding]:
    where = config.store.shared_path
    if not where:
        return
    if where.startswith("s3://"):
        if find_spec("obstore") is None:
            yield fail(f"store.shared_path {where}: obstore is not installed", "pip install 'moonpool[s3]'")
        else:
            yield ok(f"store.shared_path {where}: obstore is installed; whether the bucket answers is seen at start")
        return
    folder = Path(where)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield fail(f"store.shared_path: {folder} is no folder that can be written", "make or mount it on every host")
        return
    yield ok(f"store.shared_path {folder}: {shutil.disk_usage(folder).free / GIB:.1f} GiB free")


def state(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.launch.state import StateDir

    folder = StateDir(Path(config.cluster.state_dir))
    there = _nearest(folder.path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield fail(f"cluster.state_dir: cannot write {there}", "set cluster.state_dir")
        return
    left = folder.recorded()
    if left and folder.read() is None:
        yield warn(f"left by a dead cluster: {', '.join(left)}", "moonpool down")
        return
    yield ok(f"state in {folder.path}")


def _nearest(path: Path) -> Path:
    """``path``, or what is there of the folders above it: it is made at the start."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))


def model(config: Config) -> Iterator[Finding]:
    from moonpool.cluster.gateway.facts import read_facts
    from moonpool.core.errors import ConfigError

    path = config.model.path
    for folder in (Path(path).expanduser(), Path.home() / ".cache/moonpool/models" / path):
        if not (folder / "config.json").is_file():
            continue
        try:
            context = read_facts(folder, max_context=config.model.max_context).max_context
        except ConfigError as e:
            told, _, fix = e.message.rpartition("; ")
            yield fail(told or e.message, fix)
            return
        missing = [
            name for name, glob in (("weights", "*.safetensors"), ("tokenizer", "tokenizer.json")) if not any(folder.glob(glob))
        ]
        if missing:
            yield fail(
                f"model {path}: {folder} has no {' and no '.join(missing)}",
                f"moonpool model fetch {path}, or name another folder",
            )
            return
        yield ok(f"model {path}: {folder}, context of {context} tokens")
        return
    if Path(path).expanduser().is_absolute():
        yield fail(f"model.path: {path} is not here, or has no config.json", "put the model there, or name another folder")
        return
    yield warn(f"model {path} is not here yet", f"moonpool model fetch {path} (`moonpool up` does it, too)")
