"""What the kernel and the container allow: cores, memory, open files, locked memory, huge pages; and the clock."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.cluster.control_group import Group, control_group
from moonpool.core.config import GIB, MIB, Config

LEAST_FILES = 4_096
ROOMY = 6 * GIB  # available memory that needs no word
OLDEST = 1_735_689_600.0  # 2025-01-01: a clock that says less was never set
UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex
RDMA = Path("/sys/class/infiniband")


def cores(config: Config) -> Iterator[Finding]:
    yield of_cores(config, len(os.sched_getaffinity(0)), control_group())


def of_cores(config: Config, own: int, group: Group) -> Finding:
    limited = "" if group.cores is None or group.cores >= own else f" (of {own}: the control group's quota)"
    usable = min(own, math.ceil(group.cores)) if group.cores is not None else own
    counts = [(n.prefill + n.decode + n.both, config.on_node(n).engine.tensor_parallel) for n in config.cluster.nodes]
    workers, ranks = sum(n for n, _ in counts), sum(n * each for n, each in counts)
    text = f"{usable} cores{limited} for {workers} workers" + (f" of {ranks} ranks together" if ranks > workers else "")
    return ok(text) if ranks <= usable else warn(text, "they share cores: run fewer, such as one with --role both")


def memory(config: Config) -> Iterator[Finding]:
    import psutil

    yield of_memory(config, int(psutil.virtual_memory().available), control_group())


def of_memory(config: Config, available: int, group: Group) -> Finding:
    """What processes may still take, against what is configured: pools, and pages of every worker."""
    free, limited = available, ""
    if group.memory is not None and group.memory - group.used < available:
        free = max(group.memory - group.used, 0)
        limited = f" (the control group's limit is {group.memory / GIB:.1f} GiB)"
    nodes = config.cluster.nodes
    workers = sum(n.prefill + n.decode + n.both for n in nodes)
    wanted = config.store.pool_bytes * len(nodes) + (0 if config.engine.pages else config.engine.page_bytes) * workers
    what = "pools and pages" if config.store.pool_bytes else "pages; pools take half of what is free (store.pool_bytes = 0)"
    text = f"{free / GIB:.1f} GiB of memory available{limited}, {wanted / GIB:.1f} GiB configured for {what}"
    if config.store.pool_bytes and wanted > free:
        fix = "set store.pool_bytes and engine.page_bytes lower"
        return fail(text, f"{fix}, or raise the container's limit" if limited else fix)
    if free < ROOMY:
        return warn(text, "set store.pool_bytes and engine.page_bytes lower where processes are killed for want of memory")
    return ok(text)


def open_files(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed"
    if soft >= LEAST_FILES or soft == resource.RLIM_INFINITY:
        yield ok(text)
    elif hard >= LEAST_FILES or hard == resource.RLIM_INFINITY:
        yield warn(text, f"ulimit -n {min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536}")
    else:
        yield warn(
            text, f"the hard limit is {hard}: raise it in /etc/security/limits.conf, LimitNOFILE= or --ulimit nofile=65536"
        )


def locked_memory(config: Config) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield of_locked_memory(config, None if unlimited else soft, rdma=any(RDMA.glob("*")))


def of_locked_memory(config: Config, soft: int | None, *, rdma: bool) -> Finding:
    """Only memory registered with an RDMA device is locked. ``soft`` in bytes; None: no limit."""
    text = "locked memory: " + ("no limit" if soft is None else f"at most {soft / MIB:.0f} MiB")
    if not rdma:
        return ok(f"{text} (matters with RDMA only)")
    if soft is None:
        return ok(text)
    wanted = max(config.store.pool_bytes, GIB)
    fix = "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), or --ulimit memlock=-1 (containers)"
    return fail(f"{text}: a pool cannot be registered with the RDMA device", fix) if soft < wanted else ok(text)


def huge_pages(config: Config) -> Iterator[Finding]:
    yield of_huge_pages(Path("/proc/meminfo"), Path("/sys/kernel/mm/transparent_hugepage"))


def of_huge_pages(meminfo: Path, transparent: Path) -> Finding:
    counts = _meminfo(meminfo)
    text = f"huge pages: {counts.get('HugePages_Free', 0)} of {counts.get('HugePages_Total', 0)} free"
    if size := counts.get("Hugepagesize"):
        text += f" ({size // 1024} MiB each)"
    chosen = {name: _chosen(transparent / name) for name in ("enabled", "shmem_enabled")}
    text += f"; transparent: {chosen['enabled'] or 'unknown'}, in shared memory {chosen['shmem_enabled'] or 'unknown'}"
    if chosen["enabled"] == "never":
        return warn(text, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; large pools are read faster with them")
    return ok(text)


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if rest.split() and rest.split()[0].isdigit():
                found[name] = int(rest.split()[0])
    except OSError:
        pass
    return found


def _chosen(path: Path) -> str:
    """``always [madvise] never`` -> ``madvise``."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def clock(config: Config) -> Iterator[Finding]:
    yield of_clock(time.time(), clock_status())


def of_clock(now: float, status: int | None) -> Finding:
    """``status``: the kernel's, of adjtimex; None: it does not say. Certificates and log lines go by this clock."""
    text = f"clock: {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC"
    if now < OLDEST:
        return fail(f"{text}: it was never set", "set the clock (timedatectl, chronyd); certificates are judged by it")
    if status is None:
        return ok(text)
    if status & UNSYNCHRONISED:
        fix = "start chronyd or systemd-timesyncd: certificates, logs of several hosts and traces go by it (latencies do not)"
        return warn(f"{text}, not synchronised", fix)
    return ok(f"{text}, synchronised")


class _Timex(ctypes.Structure):
    """The first fields of the kernel's struct timex, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


def clock_status() -> int | None:
    """Reading needs no rights; nothing is changed with ``modes`` 0."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else int(timex.status)
