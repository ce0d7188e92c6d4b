"""Page memory, and memory to meet in, that several processes of one host map: an unnamed file, which ends with them."""

from __future__ import annotations

import mmap
import os

import torch

from moonpool.core.errors import ConfigError
from moonpool.engine.tensor_parallel.memory_group import group_bytes


class SharedPages:
    """``bytes`` are those of the pages, ``meeting`` those of a ``MemoryGroup``; both zeros at first.

    ``fd`` is for others to map; closing it unmaps nothing.
    """

    def __init__(self, fd: int, size: int, ranks: int) -> None:
        self.fd = fd
        whole = torch.frombuffer(mmap.mmap(fd, _whole(size, ranks), mmap.MAP_SHARED), dtype=torch.uint8)
        self.bytes, self.meeting = whole[:size], whole[-group_bytes(ranks) :]

    @classmethod
    def create(cls, size: int, ranks: int) -> SharedPages:
        """``size``: bytes of pages, all taken now: one that cannot be had is a ConfigError here, not a bus error in a step."""
        fd = os.memfd_create("moonpool-pages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, _whole(size, ranks))
            return cls(fd, size, ranks)
        except (OSError, ValueError) as e:
            os.close(fd)
            raise ConfigError(
                f"engine.pages: {size >> 20} MiB of memory that ranks share could not be had: {e}; "
                "lower engine.pages or engine.page_bytes",
                param="engine.pages",
            ) from e

    def close(self) -> None:
        os.close(self.fd)


def _whole(size: int, ranks: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + group_bytes(ranks)
