"""The CPU for the compiled backend, GPUs and the build of torch, RDMA devices, and what UCX makes of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moonpool.cli.doctor.child import python, run_child, works
from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.core.config import Config

TRY_TORCH = """
import json, torch
from importlib.metadata import PackageNotFoundError, version
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
try:
    triton = version("triton")
except PackageNotFoundError:
    triton = ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus, "triton": triton}))
"""
TRY_KERNELS = """
import json
from moonpool.engine import kernel_cache
from moonpool.engine.compiled.cpu import has_matrix_unit, may_use_matrix_unit, unfit_cpu
folder = str(kernel_cache.kernel_folder(kernel_cache.user_folder()).parent)
matrix = {"has": has_matrix_unit(), "may": may_use_matrix_unit()}
print(json.dumps({"unfit": unfit_cpu() or "", "matrix": matrix, "kept": kernel_cache.kept(), "folder": folder}))
"""
TRY_UCX = """
import os
os.environ.update({name: value for name, value in (("UCX_TLS", "tcp"), ("UCX_LOG_LEVEL", "error")) if name not in os.environ})
if not os.path.exists("/sys/class/infiniband"):
    os.environ.setdefault("UCX_MODULES", "^ib")
from nixl_cu12._api import nixl_agent, nixl_agent_config
nixl_agent("doctor", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
"""
NVIDIA_S = 10.0
RDMA = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
REINSTALL_UCX = "reinstall nixl-cu12; on a host without RDMA set UCX_MODULES=^ib"

# Names in UCX_TLS that stand for several transports.
_FAMILIES = {
    "sm": ("posix", "sysv", "cma", "xpmem", "knem"),
    "shm": ("posix", "sysv", "cma", "xpmem", "knem"),
    "mm": ("posix", "sysv", "xpmem"),
    "ib": ("rc", "ud", "dc"),
    "cuda": ("cuda", "gdr"),
    "rocm": ("rocm",),
    "ze": ("ze",),
}


def kernels(config: Config) -> Iterator[Finding]:
    ended = run_child(python(TRY_KERNELS))
    if ended.trouble:
        yield fail(f"numba: {ended.trouble}", "run scripts/setup again: no worker starts without it")
    else:
        yield from of_kernels(config, json.loads(ended.said))


def of_kernels(config: Config, told: dict[str, Any]) -> Iterator[Finding]:
    """``told`` by numba in a process of its own: what the CPU lacks or has, and whether kernels are kept in ``folder``."""
    unfit, backend, dtype = told["unfit"], config.engine.backend, config.model.dtype
    if not unfit and dtype != "bfloat16":
        unfit = f"model.dtype is {dtype}, it computes bfloat16"
    if not unfit:
        unit = told["matrix"]
        more = (" and a matrix unit (AMX)" + ("" if unit["may"] else ", which the kernel denies")) if unit["has"] else ""
        yield ok(f"engine.backend: this CPU has AVX-512 bf16{more}, so compiled can serve the families in docs/engine.md")
    elif backend == "compiled":
        yield fail(f"engine.backend: compiled cannot compute here: {unfit}", "engine.backend = auto")
    else:
        yield ok(f"engine.backend: fused or torch; compiled, which is faster, cannot compute here: {unfit}")
    if not told["kept"]:
        fix = "make it a folder of this user that nobody else may write, or name another cache folder in XDG_CACHE_HOME"
        yield warn(f"kernels cannot be kept in {told['folder']}: every start compiles them, up to a minute", fix)


def gpus(config: Config) -> Iterator[Finding]:
    listed = nvidia_smi()
    ended = run_child(python(TRY_TORCH))
    if ended.trouble:
        yield fail(f"torch: {ended.trouble}", "run scripts/setup again: nothing computes without it")
    else:
        told = json.loads(ended.said)
        yield of_torch(told, listed)
        yield of_device(config, told)


def nvidia_smi() -> list[str]:
    """Name and driver of each GPU that the driver knows; empty: no GPU, no driver, or no nvidia-smi in this container."""
    if shutil.which("nvidia-smi") is None:
        return []
    ended = run_child(("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"), limit_s=NVIDIA_S)
    return [line.strip() for line in ended.said.splitlines() if line.strip()]


def of_torch(told: dict[str, Any], listed: list[str]) -> Finding:
    """``told`` by torch in a process of its own; ``listed`` by nvidia-smi."""
    version, cuda, seen = told["version"], told["cuda"], told["gpus"]
    build = f"torch {version}, {'built for CUDA ' + cuda if cuda else 'a CPU build'}"
    if seen:
        return ok(f"{build}; GPUs: {', '.join(seen)}")
    if listed and not cuda:
        base = version.partition("+")[0]
        fix = f"install the CUDA build of torch {base} for driver {listed[0].rpartition(',')[2].strip()} to see them"
        return warn(f"{build}, but there are GPUs: {'; '.join(listed)}", fix)
    if listed:
        fix = "the driver is too old for this build, or the container has no /dev/nvidia*: update the driver, or use --gpus all"
        return warn(f"{build}, which cannot use the GPUs there are: {'; '.join(listed)}", fix)
    return ok(f"{build}; no GPU")


def of_device(config: Config, told: dict[str, Any]) -> Finding:
    """Where workers compute, and why not with Triton's kernels."""
    wanted, backend, kept, ranks = (
        config.engine.device,
        config.engine.backend,
        config.engine.kv_dtype,
        config.engine.tensor_parallel,
    )
    if not told["gpus"]:
        why, fix = "torch sees no GPU", "engine.device = auto or cpu"
    elif not told["triton"]:
        why, fix = "the package triton is not installed", "pip install triton, as the CUDA build of torch wants it"
    elif ranks > len(told["gpus"]):
        why = f"engine.tensor_parallel is {ranks}, and torch sees {len(told['gpus'])} GPUs"
        fix = f"engine.tensor_parallel = {len(told['gpus'])}"
    elif wanted == "cpu" or backend not in ("auto", "triton"):
        why, fix = f"engine.device is {wanted}, engine.backend {backend}", "engine.device and engine.backend = auto"
    else:
        pages = "in the dtype of the model" if kept == "auto" else f"as {kept}"
        return ok(f"engine.device: {told['gpus'][0]}, with backend triton ({told['triton']}), K/V kept {pages}")
    if wanted == "cuda":
        return fail(f"engine.device: 'cuda' cannot be used: {why}", fix)
    if kept != "auto" and backend != "triton":
        return fail(f"engine.kv_dtype: {kept!r} is for the backend triton: {why}", "engine.kv_dtype = auto")
    if told["gpus"] and wanted == "auto" and backend == "auto":
        return warn(f"engine.device: workers compute on the CPU beside a GPU, because {why}", fix)
    return ok(f"engine.device: workers compute on the CPU, without Triton's kernels: {why}")


def rdma(config: Config) -> Iterator[Finding]:
    yield from of_rdma(config, RDMA, VERBS, os.environ.get("UCX_TLS", config.transfer.ucx_tls))


def of_rdma(config: Config, sysfs: Path, verbs: Path, transports: str) -> Iterator[Finding]:
    """``sysfs``: the kernel's list of devices; ``verbs``: the folder of their device files; ``transports``: UCX_TLS."""
    devices = sorted(sysfs.glob("*"))
    if not devices:
        yield ok("no RDMA device: KV travels by TCP between hosts, through memory on one")
        return
    ports = [port for device in devices for port in sorted((device / "ports").glob("*"))]
    active = [port for port in ports if "ACTIVE" in _word(port / "state")]
    names = ", ".join(f"{port.parts[-3]}:{port.name} {_word(port / 'link_layer')} {_word(port / 'rate')}" for port in active)
    if not active:
        yield warn(f"RDMA devices {', '.join(d.name for d in devices)}: no port is active", "check cables, switch and drivers")
    else:
        yield ok(f"RDMA: {names}")
    if not any(verbs.glob("uverbs*")):
        fix = "give the container the devices: an RDMA resource in Kubernetes, --device=/dev/infiniband in Docker"
        yield fail(f"RDMA devices are here, but no {verbs}/uverbs*", fix)
    elif active and set(transports.split(",")) <= {"tcp", "self", "sm", "shm"} and config.transfer.carrier in ("auto", "ucx"):
        yield warn(f"transfer.ucx_tls is {transports!r}: the RDMA device is not used", "set transfer.ucx_tls to rc,ud,tcp")


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def ucx(config: Config) -> Iterator[Finding]:
    wanted = os.environ.get("UCX_TLS", config.transfer.ucx_tls)
    ended = run_child((sys.executable, "-m", "moonpool.cli.doctor.ucx_look", wanted))
    if ended.trouble:
        yield warn(f"UCX cannot be asked what it has: {ended.trouble}", REINSTALL_UCX)
    else:
        devices = os.environ.get("UCX_NET_DEVICES", config.transfer.ucx_net_devices)
        yield from of_ucx(json.loads(ended.said.splitlines()[-1]), wanted, devices)
    yield works("UCX through NIXL", TRY_UCX, REINSTALL_UCX)


def of_ucx(told: dict[str, Any], wanted: str, net_devices: str) -> Iterator[Finding]:
    """``told`` as ``ucx_look`` prints it; ``wanted`` and ``net_devices`` as UCX_TLS and UCX_NET_DEVICES have them."""
    there = [(str(transport), str(device)) for transport, device in told["there"]]
    yield ok(f"UCX {told['version']} has {_by_transport(there)}")
    missing = [name for name in _names(wanted) if not _has(name, there)]
    if told.get("trouble"):
        yield fail(f"transfer.ucx_tls: UCX does not start with {wanted!r}: {told['trouble']}", _known(there))
    elif missing:
        yield warn(f"transfer.ucx_tls: {wanted!r} asks for {', '.join(missing)}, which is not here", _known(there))
    else:
        yield ok(f"transfer.ucx_tls: {wanted!r} gives {_by_transport([(t, d) for t, d in told['asked']])}")
    known = {device for _, device in there}
    strange = [name for name in net_devices.split(",") if name not in ("", "all", *known)]
    if strange:
        yield fail(f"transfer.ucx_net_devices: no device {', '.join(strange)}", f"use one of {', '.join(sorted(known))}")


def _names(transports: str) -> list[str]:
    """Those asked for by name; ``all`` and a list of exceptions (``^``) ask for none."""
    return (
        [] if transports.startswith("^") else [name.lstrip("\\") for name in transports.split(",") if name not in ("", "all")]
    )


def _has(name: str, there: Iterable[tuple[str, str]]) -> bool:
    wanted = _FAMILIES.get(name, (name.removesuffix("_x").removesuffix("_v"),))
    return any(transport.startswith(wanted) for transport, _ in there)


def _by_transport(found: Iterable[tuple[str, str]]) -> str:
    devices: dict[str, list[str]] = {}
    for transport, device in found:
        devices.setdefault(transport, []).append(device)
    return ", ".join(f"{transport} ({' '.join(sorted(set(names)))})" for transport, names in devices.items()) or "nothing"


def _known(there: Iterable[tuple[str, str]]) -> str:
    return f"use some of {', '.join(sorted({transport for transport, _ in there}))}"
