"""Where a GPU keeps what a host's page view shows, for carriers that read there themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The same bytes in the same order as a ``PageView``, in the memory of GPU number ``device``."""

    address: int
    size: int
    device: int
