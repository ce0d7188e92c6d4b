"""What users store, as bytes and back: buffers, lists of buffers, numpy arrays, torch tensors. Nothing is ever pickled.

torch is never imported here: a tensor can only come from a caller who has it.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from moonpool.core.errors import DigestMismatch, InvalidRequest
from moonpool.kvstore.library.objects import Shape

SMALL = 16 << 10  # buffers below this on average are gathered first


class Kind(IntEnum):
    BUFFER = 0
    ARRAY = 1
    TENSOR = 2


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_bytes(buffer: Any) -> memoryview | None:
    """[n] bytes of what is plain, contiguous bytes already: the common case, checked at once."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):
        return None
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else None


def _view(buffer: Any, param: str) -> memoryview:
    try:
        return memoryview(buffer)
    except (TypeError, ValueError, BufferError) as e:
        raise InvalidRequest(
            f"{param}: {type(buffer).__name__} is no buffer; give bytes, a numpy array, a torch tensor, or a list of buffers",
            param=param,
        ) from e


def _flat(buffer: Any, param: str) -> memoryview:
    """[n] bytes, the same memory where it is contiguous."""
    view = _view(buffer, param)
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _require_plain_array(array: np.ndarray[Any, Any], param: str) -> None:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise InvalidRequest(
            f"{param}: a masked array is values and a mask; give array.filled(...), or .data and .mask each by itself",
            param=param,
        )
    if array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidRequest(f"{param}: dtype {array.dtype} has no plain bytes; give numbers", param=param)


def _require_plain_tensor(tensor: Any, param: str) -> None:
    """Only dense tensors whose memory is their value can be recorded."""
    torch = sys.modules["torch"]
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = f"its layout is {'nested' if tensor.is_nested else tensor.layout}; give tensor.to_dense(), or its parts"
    elif tensor.is_quantized:
        what = "it is quantized; give tensor.int_repr(), and scale and zero point by themselves"
    elif tensor.device.type == "meta":
        what = "it is on the meta device and has no bytes; give one with memory"
    elif tensor.is_conj() or tensor.is_neg():
        what = "it is a conjugate or negative view; give tensor.resolve_conj().resolve_neg()"
    else:
        return
    raise InvalidRequest(f"{param}: this tensor cannot be used: {what}", param=param)


def _of_array(array: np.ndarray[Any, Any], param: str) -> memoryview:
    """[n] bytes, the same memory where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _of_tensor(tensor: Any, param: str) -> memoryview:
    """The tensor's own memory where it is contiguous and on the host."""
    torch = sys.modules["torch"]
    try:
        return _flat(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), param)
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise InvalidRequest(f"{param}: a {tensor.dtype} tensor on {tensor.device} has no plain bytes: {e}", param=param) from e


def size_of(value: Any) -> int:
    """Bytes of ``value`` as it will be stored. InvalidRequest where it is none of what can be stored. Copies nothing."""
    if isinstance(value, list | tuple):
        return sum(map(_size_of_one, value))
    return _size_of_one(value)


def _size_of_one(value: Any) -> int:
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, np.ndarray):
        _require_plain_array(value, "value")
        return value.nbytes
    if _is_tensor(value):
        _require_plain_tensor(value, "value")
        return int(value.nbytes)
    return _view(value, "value").nbytes


def to_parts(value: Any) -> tuple[Shape, list[memoryview]]:
    """How ``value``, which has a ``size_of``, is recorded, and its bytes. InvalidRequest where it has none that are plain."""
    if isinstance(value, np.ndarray):
        part = view_of(value, "value")
        return Shape(Kind.ARRAY, len(part), value.dtype.str, value.shape), [part]
    if _is_tensor(value):
        part = _of_tensor(value, "value")
        return Shape(Kind.TENSOR, len(part), str(value.dtype).removeprefix("torch."), tuple(value.shape)), [part]
    if isinstance(value, list | tuple):
        parts = [view for one in value if len(view := view_of(one, "value"))]
        size = sum(map(len, parts))
        if size < SMALL * len(parts):  # one copy more costs less than looking after each of them
            parts = [memoryview(b"".join(parts))]
        return Shape(Kind.BUFFER, size), parts
    part = view_of(value, "value")
    return Shape(Kind.BUFFER, len(part)), [part] if len(part) else []


def view_of(value: Any, param: str) -> memoryview:
    """[n] bytes of one buffer, array or tensor."""
    view = _as_bytes(value)
    if view is not None:
        return view
    if isinstance(value, np.ndarray):
        return _of_array(value, param)
    return _of_tensor(value, param) if _is_tensor(value) else _flat(value, param)


class Target(NamedTuple):
    """What a value is to be copied into: the caller's ``into``, and writable views of its memory.

    ``dtype`` and ``shape`` are those of an array or a tensor; plain bytes (uint8 of one dimension too) and lists have none.
    """

    into: Any
    views: list[memoryview]
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def refuses(self, shape: Shape) -> str:
        """Why a value of this shape cannot be copied here; empty: it can."""
        size = sum(map(len, self.views))
        if size != shape.size:
            return f"into: {size} bytes for a value of {shape.size}; give as many"
        if self.dtype and shape.kind != Kind.BUFFER and (self.dtype, self.shape) != (_known(shape.dtype), shape.shape):
            return (
                f"into: {self.dtype} of shape {self.shape} where the value is {_known(shape.dtype)} of shape {shape.shape}; "
                "give such a one, or plain bytes"
            )
        return ""


def _known(dtype: str) -> str:
    """One name for what numpy and torch both have."""
    try:
        return np.dtype(dtype).str
    except (TypeError, ValueError, SyntaxError):
        return dtype


def target(into: Any) -> Target:
    """InvalidRequest where ``into`` is no buffer, nor a list of them, that can be written."""
    if isinstance(into, list | tuple):
        return Target(into, [view for one in into if len(view := _target(one))])
    view = _target(into)
    views = [view] if len(view) else []
    if isinstance(into, np.ndarray):
        dtype, shape = into.dtype.str, into.shape
    elif _is_tensor(into):
        dtype, shape = _known(str(into.dtype).removeprefix("torch.")), tuple(into.shape)
    else:
        return Target(into, views)
    return Target(into, views) if dtype == "|u1" and len(shape) == 1 else Target(into, views, dtype, shape)


def _target(one: Any) -> memoryview:
    """[n] bytes of ``one``'s own memory. InvalidRequest where these would be a copy, or cannot be written."""
    if isinstance(one, np.ndarray):
        _require_plain_array(one, "into")
    elif _is_tensor(one):
        _require_plain_tensor(one, "into")
    plain = _as_bytes(one)
    if plain is not None and not plain.readonly:
        return plain
    if isinstance(one, np.ndarray):
        own = one.flags.c_contiguous
    elif _is_tensor(one):
        own = one.is_contiguous() and one.device.type == "cpu"
    else:
        own = _is_contiguous(one)
    view = view_of(one, "into")
    if not own or (view.readonly and len(view)):
        raise InvalidRequest("into: give writable, contiguous memory of the host", param="into")
    return view


def _is_contiguous(buffer: Any) -> bool:
    return not isinstance(buffer, memoryview) or buffer.c_contiguous


def make_room(shape: Shape) -> tuple[Any, list[memoryview]]:
    """A new value of this shape, and views of its memory to copy into. ``finish`` gives what the user gets."""
    if shape.kind == Kind.BUFFER:
        buffer = bytearray(shape.size)
        return buffer, [memoryview(buffer)] if shape.size else []
    array = np.empty(shape.size, dtype=np.uint8)
    return array, [array.data] if shape.size else []


def finish(raw: Any, shape: Shape) -> Any:
    """``raw`` from ``make_room``, verified meanwhile, as what was stored. DigestMismatch: the header contradicts itself."""
    if shape.kind == Kind.BUFFER:
        return raw
    try:
        if shape.kind == Kind.ARRAY:
            return raw.view(np.dtype(shape.dtype)).reshape(shape.shape)
        torch = sys.modules.get("torch")
        if torch is None:
            raise InvalidRequest("value: it is a torch tensor; import torch first, or give `into`", param="value")
        dtype = getattr(torch, shape.dtype)
        if not shape.size:
            return torch.empty(shape.shape, dtype=dtype)
        return torch.from_numpy(raw).view(dtype).reshape(shape.shape)
    except (TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise DigestMismatch(f"a value of {shape.size} bytes is no {shape.dtype} of shape {shape.shape}") from e
