"""What users store, as bytes and back: buffers, lists of buffers, numpy arrays, torch tensors. Nothing is ever pickled.

torch is never imported here: a tensor can only come from a caller who has it.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

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


def _flat(buffer: Any, param: str) -> memoryview:
    """[n] bytes, the same memory where it is contiguous."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError) as e:
        raise InvalidRequest(
            f"{param}: {type(buffer).__name__} is no buffer; give bytes, a numpy array, a torch tensor, or a list of buffers",
            param=param,
        ) from e
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _of_array(array: np.ndarray[Any, Any], param: str) -> memoryview:
    """[n] bytes, the same memory where it is contiguous."""
    if array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidRequest(f"{param}: dtype {array.dtype} has no plain bytes; give numbers", param=param)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _of_tensor(tensor: Any, param: str) -> memoryview:
    """The tensor's own memory where it is contiguous and on the host."""
    torch = sys.modules["torch"]
    return _flat(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), param)


def to_parts(value: Any) -> tuple[Shape, list[memoryview]]:
    """How ``value`` is recorded, and its bytes. InvalidRequest where it is none of what can be stored."""
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


def targets(into: Any) -> list[memoryview]:
    """Writable views of the buffer, or the list of buffers, that a value is to be copied into."""
    if isinstance(into, list | tuple):
        return [view for one in into if len(view := _target(one))]
    view = _target(into)
    return [view] if len(view) else []


def _target(one: Any) -> memoryview:
    """[n] bytes of ``one``'s own memory. InvalidRequest where these would be a copy, or cannot be written."""
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
