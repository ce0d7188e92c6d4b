"""The line between rank 0 and another rank: a pair of local sockets, weights and steps one way, nothing but raw bytes and JSON.

Every frame begins with its kind and the lengths of what follows, which are checked before memory is taken.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.parsing import read_json
from moonpool.engine.backends import Span
from moonpool.engine.recipe import Experts, Layer, Projection, Recipe, Rotary

_HEAD = struct.Struct("<II")  # kind, bytes of the record
_RECORD, _STEP, _END = 1, 2, 3
_MOST_RECORD = 4 << 20
_COUNTS = struct.Struct("<IIIIII")  # of a step: tokens, rows, page numbers, wanted; brings, sends
_MOST_COUNT = 1 << 26
_MOST_TENSOR = 1 << 40
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Recipe, Layer, Projection, Experts, Rotary)}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


Sums = Literal["memory", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks compute together. ``x`` [tokens, hidden]: the embedded ids.

    ``brings``: slices may come in while it is computed, before their layer. ``sends``: what it writes goes to the host's view,
    layer by layer. Both are for ranks that keep pages of their own.
    """

    spans: tuple[Span, ...]
    wanted: tuple[int, ...]
    x: torch.Tensor
    brings: bool = False
    sends: bool = False


class Line:
    """One end. OSError where the other end is gone, TimeoutError where it takes nothing for as long as was said."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @property
    def fd(self) -> int:
        return self._end.fileno()

    def ended(self) -> bool:
        """Whether the other end is gone. Never blocks."""
        poll = select.poll()
        poll.register(self._end, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._end.close()

    def send_record(self, record: object) -> None:
        text = json.dumps(record).encode()
        self._end.sendall(_HEAD.pack(_RECORD, len(text)) + text)

    def record(self) -> Any:
        kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
        if kind == _END:
            raise EOFError("the line ended")
        if kind != _RECORD or size > _MOST_RECORD:
            raise Bug(f"a record was expected, kind {kind} of {size} bytes came")
        return read_json(bytes(self._exactly(size)))

    def send_fd(self, fd: int) -> None:
        socket.send_fds(self._end, [b"f"], [fd])

    def received_fd(self) -> int:
        _, fds, _, _ = socket.recv_fds(self._end, 1, 1)
        if len(fds) != 1:
            raise EOFError("the line ended")
        return fds[0]

    def send_part(self, part: object) -> None:
        """A recipe or what one is made of, its tensors after it."""
        tensors: list[torch.Tensor] = []
        self.send_record(_described(part, tensors))
        for tensor in tensors:
            self._end.sendall(_bytes(tensor.contiguous()))

    def part(self) -> Any:
        record = self.record()
        return _built(record, iter([self._tensor(shape, dtype) for shape, dtype in _tensors(record)]))

    def send_step(self, step: Step) -> None:
        tables = [span.table for span in step.spans]
        numbers = [(span.first, span.count, span.start, len(span.table)) for span in step.spans]
        rows = np.array(numbers, dtype=np.int64).reshape(-1)
        counts = (len(step.x), len(tables), sum(len(table) for table in tables), len(step.wanted), step.brings, step.sends)
        arrays = (rows, *tables, np.array(step.wanted, dtype=np.int64))
        body = b"".join((_COUNTS.pack(*counts), *(array.tobytes() for array in arrays)))
        self._end.sendall(_HEAD.pack(_STEP, len(body)) + body)
        self._end.sendall(_bytes(step.x.cpu().contiguous()))

    def send_end(self, limit_s: float) -> None:
        """TimeoutError where the other end takes nothing for ``limit_s``, as one that was stopped."""
        self._end.settimeout(limit_s)
        self._end.sendall(_HEAD.pack(_END, 0))

    def step(self, hidden: int, dtype: torch.dtype) -> Step | None:
        """None: there will be no further one."""
        try:
            kind, _ = _HEAD.unpack(self._exactly(_HEAD.size))
        except (EOFError, ConnectionError):
            return None
        if kind == _END:
            return None
        tokens, rows, pages, wanted, brings, sends = counts = _COUNTS.unpack(self._exactly(_COUNTS.size))
        if kind != _STEP or max(counts) > _MOST_COUNT:
            raise Bug(f"a step was expected, kind {kind} with {counts} came")
        numbers = self._numbers(4 * rows).reshape(rows, 4)
        tables = np.split(self._numbers(pages), np.cumsum(numbers[:, 3])[:-1]) if rows else []
        spans = tuple(
            Span(int(first), int(count), int(start), table)
            for (first, count, start, _), table in zip(numbers, tables, strict=True)
        )
        ids = tuple(self._numbers(wanted).tolist())
        return Step(spans, ids, self._tensor((tokens, hidden), dtype), bool(brings), bool(sends))

    def _numbers(self, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self._exactly(8 * count), dtype=np.int64)

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self._fill(_bytes(tensor))
        return tensor

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        self._fill(memoryview(found))
        return found

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            n = self._end.recv_into(view[at:])
            if not n:
                raise EOFError("the line ended")
            at += n


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _described(part: object, tensors: list[torch.Tensor]) -> object:
    """As JSON; every tensor by its shape and dtype, in the order of ``tensors``."""
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return {"shape": list(part.shape), "dtype": str(part.dtype).removeprefix("torch.")}
    if isinstance(part, tuple):
        return [_described(one, tensors) for one in part]
    if is_dataclass(part) and not isinstance(part, type):
        named = {field.name: _described(getattr(part, field.name), tensors) for field in fields(part)}
        return {"kind": type(part).__name__, "fields": named}
    return part


def _tensors(record: Any) -> Iterator[tuple[list[int], torch.dtype]]:
    """As ``_described`` met them."""
    if isinstance(record, list):
        for one in record:
            yield from _tensors(one)
    elif isinstance(record, dict) and "shape" in record:
        shape = [int(n) for n in record["shape"]]
        if min(shape, default=1) < 0 or 4 * int(np.prod(shape, dtype=np.float64)) > _MOST_TENSOR:
            raise Bug(f"a tensor of {shape} was announced")
        yield shape, _DTYPES[record["dtype"]]
    elif isinstance(record, dict):
        for one in record["fields"].values():
            yield from _tensors(one)


def _built(record: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(record, list):
        return tuple(_built(one, tensors) for one in record)
    if isinstance(record, dict) and "shape" in record:
        return next(tensors)
    if isinstance(record, dict):
        return _KINDS[record["kind"]](**{name: _built(one, tensors) for name, one in record["fields"].items()})
    return record
