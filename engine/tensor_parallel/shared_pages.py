"""Page memory that several processes of one host map: an unnamed file, of which nothing is left once they have all ended."""

from __future__ import annotations

import mmap
import os

import torch

from moonpool.core.errors import ConfigError


class SharedPages:
    """``bytes`` are zeros at first. ``fd`` is for others to map; closing it unmaps nothing."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.bytes = torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedPages:
        """All of it is taken now: a page that cannot be had is an error here, not a bus error in a step. ConfigError."""
        fd = os.memfd_create("moonpool-pages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except (OSError, ValueError) as e:
            os.close(fd)
            raise ConfigError(
                f"engine.pages: {size >> 20} MiB of memory that ranks share could not be had: {e}; "
                "lower engine.pages or engine.page_bytes",
                param="engine.pages",
            ) from e

    def close(self) -> None:
        os.close(self.fd)
