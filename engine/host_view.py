"""What hosts, pools and wires see of an engine's pages: canonical bytes in host memory.

Where pages are canonical and in host memory they are their own view. Else (pages of a GPU, quantised pages) there are two
memories of each page, and ``StagedView`` keeps them alike where somebody will read the other one:

* after K/V of a layer is written, the slices of the step are packed and copied to the host beside what computes, and
  ``on_layer`` is told once they are there: one layer late, so that the copy runs beside the next layer's compute;
* slices that came to the host from outside (``came_in``) are copied to the device at once, and the first step that may read
  them waits on the device, layer by layer;
* steps without ``on_layer`` (answers) copy nothing: their pages are *behind* on the host until somebody wants them there
  (``gone_out``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.device_memory import DeviceMemory
from moonpool.core.errors import TransferFailed
from moonpool.core.page_view import PageView
from moonpool.engine.backends import Hook, Span
from moonpool.engine.lanes import Lanes, Mark
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.slice_packing import Packing

Hooks = tuple[Hook | None, Hook | None]  # before_layer and on_layer


class HostView(PageView, Protocol):
    in_device: DeviceMemory | None  # the same bytes on a GPU; None where there are none, or others

    def step(self, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> AbstractContextManager[Hooks]:
        """Around one forward pass: the hooks for its backend. What hooks raise comes out, at the end too."""

    def landed(self, layer: int) -> None:
        """Blocks until all of ``layer`` that came in is on the device, too."""

    def behind(self, pages: Sequence[int]) -> bool:
        """Whether ``bytes`` lacks anything that steps wrote into ``pages``."""

    def gone_out(self, pages: Sequence[int]) -> None:
        """Make ``bytes`` hold what steps that are over wrote into ``pages``. Blocks where they are ``behind``."""

    def copy_page(self, source: int, target: int) -> None: ...

    def fill(self, pages: Sequence[int], byte: int) -> None:
        """Every byte of ``pages``."""


class OwnMemory:
    """Canonical pages in host memory."""

    in_device: DeviceMemory | None = None

    def __init__(self, memory: PageTensor) -> None:
        layout = memory.layout
        self.bytes: NDArray[np.uint8] = (
            memory.tensor[: memory.pages].view(torch.uint8).numpy().reshape(memory.pages, layout.layers, layout.slice_bytes)
        )

    @contextmanager
    def step(self, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> Iterator[Hooks]:
        yield before_layer, on_layer

    def came_in(self, layer: int, pages: Sequence[int]) -> None:
        pass

    def landed(self, layer: int) -> None:
        pass

    def behind(self, pages: Sequence[int]) -> bool:
        return False

    def gone_out(self, pages: Sequence[int]) -> None:
        pass

    def copy_page(self, source: int, target: int) -> None:
        """By numpy: workers call this on their event loop, which is to get no OpenMP team of its own."""
        self.bytes[target] = self.bytes[source]

    def fill(self, pages: Sequence[int], byte: int) -> None:
        self.bytes[np.asarray(pages, dtype=np.int64)] = byte


class StagedView:
    """Two memories of each page. ``step`` is for one thread at a time, the rest from any."""

    def __init__(
        self, memory: PageTensor, packing: Packing, lanes: Lanes, host: torch.Tensor, heads: range | None = None
    ) -> None:
        """``host``: uint8 [pages, layers, slice_bytes], pinned where the pages are a GPU's. ``heads``: which of its K/V heads
        ``memory`` keeps, and nothing else is read or written there; None: all."""
        self.bytes: NDArray[np.uint8] = host.numpy()
        self.in_device = _in_device(memory)
        self._memory, self._packing, self._lanes, self._whole = memory, packing, lanes, host
        self._host = _stripes(host, heads, memory.layout.block_tokens * memory.layout.row_bytes)
        self._own_bytes: NDArray[np.uint8] = self._host.numpy()
        self._coming_in = threading.Lock()  # marks are noted in the order of the lane
        self._lock = threading.Lock()  # all below
        self._behind = np.zeros(memory.pages, dtype=np.bool_)
        self._came: dict[int, Mark] = {}  # by layer: the last slices that came in
        self._all_came: Mark | None = None  # the last of all layers: a lane has an order
        self._over = lanes.computed()  # behind steps that are over, and behind what was copied or filled since

    @contextmanager
    def step(self, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> Iterator[Hooks]:
        fresh = fresh_pages(spans, self._memory.layout.block_tokens)
        sending = None if on_layer is None else _Sending(self, fresh, on_layer)
        with self._lanes.on_device():
            try:
                if before_layer is None and sending is None:
                    self._hold_all()
                    yield None, None
                else:
                    yield self._before(before_layer), None if sending is None else sending.written
                if sending is not None:
                    sending.tell()
            finally:
                self._end(fresh, sending)

    def _before(self, before_layer: Hook | None) -> Hook:
        def before(layer: int) -> None:
            if before_layer is not None:
                before_layer(layer)
            with self._lock:
                came = self._came.get(layer)
            if came is not None:
                self._lanes.hold(came)

        return before

    def _end(self, fresh: dict[int, int], sending: _Sending | None) -> None:
        """Nothing of this step writes to the host any more; its pages may be used again once the device is through."""
        if sending is not None:
            sending.settle()
        with self._lock:
            self._over = self._lanes.computed()
            self._behind[list(fresh)] = sending is None or not sending.complete

    def send(self, layer: int, fresh: dict[int, int]) -> Mark:
        """Copy ``layer`` of the pages ``fresh``, with so many valid tokens, to the host, as it is computed by now."""
        return self._lanes.outward.put(partial(self._copy_out, (layer,), fresh), (self._lanes.computed(),))

    def came_in(self, layer: int, pages: Sequence[int]) -> None:
        """TransferFailed where the device cannot take it."""
        if not pages:
            return
        chosen = list(pages)

        def copy() -> None:
            data = torch.empty((len(chosen), *self._host.shape[2:]), dtype=torch.uint8, device=self._memory.device)
            for into, page in zip(data, chosen, strict=True):
                for to, stripe in zip(into, self._host[page, layer], strict=True):
                    to.copy_(stripe, non_blocking=True)
            self._packing.unpack(chosen, layer, data.view(len(chosen), -1))

        with self._coming_in:
            with self._lock:
                over = self._over
            mark = self._put_inward(copy, over)
            with self._lock:
                self._all_came = self._came[layer] = mark
                self._behind[chosen] = False

    def _put_inward(self, copy: Callable[[], None], over: Mark) -> Mark:
        try:
            return self._lanes.inward.put(copy, (over,))
        except RuntimeError as e:  # what torch raises, out of memory included
            raise TransferFailed(f"KV could not be copied to the device: {e}") from e

    def landed(self, layer: int) -> None:
        with self._lock:
            came = self._came.get(layer)
        if came is not None:
            came.wait()

    def behind(self, pages: Sequence[int]) -> bool:
        with self._lock:
            return bool(self._behind[list(pages)].any())

    def gone_out(self, pages: Sequence[int]) -> None:
        with self._lock:
            late = [page for page in dict.fromkeys(pages) if self._behind[page]]
            after = (self._over,) if self._all_came is None else (self._over, self._all_came)
        if not late:
            return
        whole = dict.fromkeys(late, self._memory.layout.block_tokens)
        self._lanes.outward.put(partial(self._copy_out, range(self._memory.layout.layers), whole), after).wait()
        with self._lock:
            self._behind[late] = False

    def _copy_out(self, layers: Sequence[int], valid: dict[int, int]) -> None:
        """Of each page, so many tokens."""
        for layer in layers:
            packed = self._packing.pack(list(valid), layer, list(valid.values()))
            for data, page in zip(packed.view(len(packed), *self._host.shape[2:]), valid, strict=True):
                for to, stripe in zip(self._host[page, layer], data, strict=True):
                    to.copy_(stripe, non_blocking=True)

    def copy_page(self, source: int, target: int) -> None:
        with self._lock, self._lanes.on_device():
            self._hold_came()
            self._memory.copy_page(source, target)
            self._own_bytes[target] = self._own_bytes[source]
            self._behind[target] = self._behind[source]
            self._over = self._lanes.computed()

    def fill(self, pages: Sequence[int], byte: int) -> None:
        with self._lock, self._lanes.on_device():
            self._hold_came()
            self._memory.fill(pages, byte)
            self._own_bytes[np.asarray(pages, dtype=np.int64)] = byte
            self._behind[list(pages)] = False
            self._over = self._lanes.computed()

    def _hold_all(self) -> None:
        with self._lock:
            self._hold_came()

    def _hold_came(self) -> None:
        if self._all_came is not None:
            self._lanes.hold(self._all_came)


class _Sending:
    """Fresh slices of one step on their way to the host, and who is told of each layer."""

    def __init__(self, view: StagedView, fresh: dict[int, int], on_layer: Hook) -> None:
        self._view, self._fresh, self._on_layer = view, fresh, on_layer
        self._under_way: tuple[int, Mark] | None = None
        self.complete = False

    def written(self, layer: int) -> None:
        """The backend's hook: send this layer, then tell of the one before."""
        mark = self._view.send(layer, self._fresh)
        told, self._under_way = self._under_way, (layer, mark)
        if told is not None:
            self._tell(*told)

    def tell(self) -> None:
        """Of the last layer: all were written."""
        if self._under_way is not None:
            self._tell(*self._under_way)
        self.complete = True

    def _tell(self, layer: int, mark: Mark) -> None:
        mark.wait()
        self._on_layer(layer)

    def settle(self) -> None:
        if self._under_way is not None:
            self._under_way[1].wait()


def _stripes(host: torch.Tensor, heads: range | None, plane_bytes: int) -> torch.Tensor:
    """[pages, layers, stripes, bytes]: what lies in one piece of each slice. K of some heads is one, V of them another."""
    if heads is None:
        return host[:, :, None]
    return host.view(*host.shape[:2], 2, -1, plane_bytes)[:, :, :, heads.start : heads.stop].flatten(3)


def _in_device(memory: PageTensor) -> DeviceMemory | None:
    """Canonical pages of a GPU."""
    if memory.device.type != "cuda" or memory.exponents is not None:
        return None
    return DeviceMemory(memory.tensor.data_ptr(), memory.pages * memory.layout.block_bytes, memory.device.index)


def fresh_pages(spans: Sequence[Span], block_tokens: int) -> dict[int, int]:
    """The pages that a step writes into, and how many of each page's tokens are valid after it."""
    return {
        int(span.table[block]): min(span.end - block * block_tokens, block_tokens)
        for span in spans
        for block in range(span.start // block_tokens, (span.end - 1) // block_tokens + 1)
    }
