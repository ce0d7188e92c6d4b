"""On which device an engine computes and keeps its pages, and the host's view that goes with that."""

from __future__ import annotations

import weakref
from importlib.util import find_spec

import torch

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import ITEM_BYTES, KVLayout
from moonpool.engine.host_view import HostView, OwnMemory, StagedView
from moonpool.engine.lanes import CudaLanes, HostLanes
from moonpool.engine.page_tensor import CPU, PageTensor
from moonpool.engine.quantised import Kept
from moonpool.engine.slice_packing import Packing, TorchPacking

FP8_CAPABILITY = (8, 9)  # from where on Triton converts e4m3


def device_of(config: Config) -> torch.device:
    """ConfigError where the one that the configuration names is not to be had, or cannot keep pages as it asks for."""
    asked = config.engine.device
    trouble = None if asked == "cpu" else cuda_trouble(config)
    if asked == "cuda" and trouble is not None:
        raise ConfigError(f"engine.device: 'cuda' cannot be used: {trouble}; use auto or cpu", param="engine.device")
    ranks = config.engine.tensor_parallel
    device = CPU
    if asked != "cpu" and trouble is None:
        device = torch.device("cuda", torch.cuda.current_device() if ranks == 1 else 0)
    kept, backend = config.engine.kv_dtype, config.engine.backend
    if kept != "auto" and backend != "triton" and not (backend == "auto" and device.type == "cuda"):
        raise ConfigError(
            f"engine.kv_dtype: {kept!r} is for the backend triton, and engine.backend {backend!r} is another one on "
            f"{device.type}; use auto, or a GPU",
            param="engine.kv_dtype",
        )
    if kept == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"engine.kv_dtype: 'fp8' is not known to {torch.cuda.get_device_name(device)}; use int8 or auto",
            param="engine.kv_dtype",
        )
    return device


def cuda_trouble(config: Config) -> str | None:
    """Why this process cannot compute on a GPU."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "torch is a CPU build (docs/gpu.md names what a GPU needs)"
        return f"torch {torch.__version__} sees no GPU"
    if find_spec("triton") is None:
        return "the package triton, whose kernels attend there, is not installed"
    if config.engine.tensor_parallel > torch.cuda.device_count():
        return f"engine.tensor_parallel is {config.engine.tensor_parallel}, and torch sees {torch.cuda.device_count()} GPUs"
    if config.engine.backend not in ("auto", "triton"):
        return f"engine.backend {config.engine.backend!r} computes on CPUs"
    return None


def described(device: torch.device, kept: Kept) -> str:
    """For operators."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
    return name if kept == "auto" else f"{name}, K/V kept as {kept}"


def page_bytes(layout: KVLayout, kept: Kept) -> int:
    """Of one page as a device keeps it: in eight bits with an exponent for each row, or canonical."""
    if kept == "auto":
        return layout.block_bytes
    rows = layout.block_bytes // layout.row_bytes
    return rows * (layout.row_bytes // ITEM_BYTES[layout.dtype] + 1)


def available(device: torch.device) -> int:
    """Bytes of a GPU's memory that this process may still take."""
    return int(torch.cuda.mem_get_info(device)[0])


def view_of(memory: PageTensor) -> HostView:
    """The pages themselves where they are canonical and the host's; else a second memory beside them, pinned for a GPU."""
    if memory.device.type == "cpu" and memory.exponents is None:
        return OwnMemory(memory)
    layout = memory.layout
    return staged_view(memory, torch.zeros((memory.pages, layout.layers, layout.slice_bytes), dtype=torch.uint8))


def staged_view(memory: PageTensor, host: torch.Tensor, heads: range | None = None) -> StagedView:
    """Over ``host``, uint8 [pages, layers, slice_bytes] of all heads, of which ``memory`` keeps ``heads``; None: all."""
    if memory.device.type == "cpu":
        return StagedView(memory, _packing(memory), HostLanes(), host, heads)
    _lock_pages(host)
    return StagedView(memory, _packing(memory), CudaLanes(memory.device), host, heads)


def _lock_pages(host: torch.Tensor) -> None:
    """Page-locked until it is freed. Not by PyTorch's allocator, which takes the next power of two of bytes."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if error:
        raise ConfigError(
            f"engine.pages: the host's view of device pages, {host.numel() >> 20} MiB, cannot be page-locked "
            f"(CUDA error {error}); lower engine.pages or engine.page_bytes, or raise the limit of locked memory",
            param="engine.pages",
        )
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr())


def _packing(memory: PageTensor) -> Packing:
    if memory.device.type == "cpu" and memory.exponents is None:
        return TorchPacking(memory)
    try:
        from moonpool.engine.triton.packing import TritonPacking
    except ImportError:
        return TorchPacking(memory)
    return TritonPacking(memory)
