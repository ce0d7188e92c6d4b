"""The frame of both 8-bit codecs: one float32 scale per layer and plane (K or V of a head; latents), then one byte per element.

An encoded slice is ``[planes]`` little-endian scales, then ``[planes][token][head_dim]`` bytes. A scale is the
plane's largest magnitude over the largest code, rounded down, so that the largest value cannot overflow when it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import SCALE_BYTES, KVLayout
from moonpool.kvstore.codecs.floats import Floats, from_floats, to_floats

SMALLEST = np.float32(2.0**-126)  # below it a float32 loses digits, and its inverse overflows


def encode(
    layout: KVLayout,
    full: NDArray[np.uint8],
    into: NDArray[np.uint8],
    largest: float,
    quantise: Callable[[Floats], NDArray[np.uint8]],
) -> bool:
    """False where a value is infinite or not a number. ``quantise`` maps [-largest, largest] to codes."""
    values = to_floats(layout, full)
    top = np.maximum(values.max(axis=1), -values.min(axis=1))
    if not np.isfinite(top).all():
        return False
    scales = np.maximum(np.nextafter(top / np.float32(largest), np.float32(0)), SMALLEST)
    begin = layout.planes * SCALE_BYTES
    into[:begin].view("<f4")[:] = scales
    into[begin:] = quantise(values * (1 / scales)[:, None]).reshape(-1)
    return True


def decode(
    layout: KVLayout, coded: NDArray[np.uint8], into: NDArray[np.uint8], expand: Callable[[NDArray[np.uint8]], Floats]
) -> None:
    begin = layout.planes * SCALE_BYTES
    values = expand(coded[begin:].reshape(layout.planes, -1))
    values *= coded[:begin].view("<f4")[:, None]
    from_floats(layout, values, into)
