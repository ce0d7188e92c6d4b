"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

# Instruction sets that decide how fast matrices are multiplied.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def machine_facts() -> dict[str, str | int | float | list[str]]:
    """Cores this process may use, CPU model and flags, bytes of memory, load of the last minute, versions of what computes."""
    model, flags = _cpu(Path("/proc/cpuinfo"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "cpu_flags": [f for f in _FLAGS if f in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1_min": os.getloadavg()[0],  # above about 0.2 before a measurement, something else was running
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _cpu(cpuinfo: Path) -> tuple[str, frozenset[str]]:
    found: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found.get("model name", platform.machine()), frozenset(found.get("flags", found.get("features", "")).split())
