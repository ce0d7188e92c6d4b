"""What a host's stores and carriers see of a worker's device pages, and how its engine hears of what they write there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PageView(Protocol):
    bytes: NDArray[np.uint8]  # [pages, layers, slice_bytes], in canonical order

    def came_in(self, layer: int, pages: Sequence[int]) -> None:
        """``layer`` of ``pages`` was written in ``bytes``, and stays as it is until their next step is over.

        From any thread, before anybody is told that it is there. TransferFailed where the device cannot take it.
        """
