"""Every check of the doctor, in the order in which they are told."""

from __future__ import annotations

from moonpool.cli.doctor import devices, files, limits, network, storage, versions
from moonpool.cli.doctor.child import CHILD_S
from moonpool.cli.doctor.finding import Check

UCX_S = 2 * CHILD_S + 5.0  # two children, one after the other
RAY_S = CHILD_S + network.RAY_S + 10.0

CHECKS = (
    Check("versions", versions.versions),
    Check("cores", limits.cores),
    Check("memory", limits.memory),
    Check("shared memory", storage.shared_memory, late="the file system of store.directory hangs: look at its mount"),
    Check("huge pages", limits.huge_pages),
    Check("locked memory", limits.locked_memory),
    Check("open files", limits.open_files),
    Check("clock", limits.clock),
    Check("kernels", devices.kernels, CHILD_S + 5.0, "import numba by hand, and see what it waits for"),
    Check("gpu", devices.gpus, CHILD_S + devices.NVIDIA_S + 5.0, "import torch by hand, and see what it waits for"),
    Check("rdma", devices.rdma),
    Check("ucx", devices.ucx, UCX_S, "run again with UCX_LOG_LEVEL=info, and see what it waits for"),
    Check("ray", network.ray, RAY_S, "start Ray by hand (ray status), or use --launcher process"),
    Check("model", storage.model, late="the file system of model.path hangs: look at its mount"),
    Check("ports", network.ports),
    Check("exposure", files.exposed),
    Check("certificates", files.certificates),
    Check("keys", files.files_named),
    Check(
        "registry", network.registry, 2 * network.ANSWER_S + 5.0, "look at etcd's own log; it takes calls and does not answer"
    ),
    Check("ssd", storage.ssd, late="the file system of store.ssd_path hangs: look at its mount and disk"),
    Check("shared tier", storage.shared_tier, late="the file system of store.shared_path hangs: look at its mount"),
    Check("state", storage.state),
)
