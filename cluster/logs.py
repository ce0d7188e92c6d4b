"""Structured logs: one line of JSON or logfmt, one file per process (``<state_dir>/logs/<member>.log``) or standard error.

Whatever concerns a request says so in its line: ``request`` and ``attempt`` are bound to the task that works for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

import structlog

from moonpool.core.config import ObserveConfig

OLDER = ".1"  # behind the name of the file before this one


def log_path(state_dir: Path, member: str) -> Path:
    return state_dir / "logs" / f"{member}.log"


class BoundedFile:
    """Appends to ``path``; once ``limit`` bytes are in it, it becomes the older one and is begun anew. Any thread."""

    def __init__(self, path: Path, limit: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._limit = path, limit
        self._lock = threading.Lock()
        self.lost = 0  # lines that the disk did not take
        self._file = self._open()

    def _open(self) -> TextIO:
        file = self._path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        self._size = os.fstat(file.fileno()).st_size
        return file

    def write(self, text: str) -> int:
        with self._lock:
            if self._size >= self._limit:
                self._begin_anew()
            self._size += len(text)
            try:
                return self._file.write(text)
            except OSError:  # a full disk costs lines, not requests
                self.lost += 1
                return 0

    def _begin_anew(self) -> None:
        self._file.close()
        try:
            self._path.replace(self._path.with_name(self._path.name + OLDER))
        except OSError:  # it grows on
            pass
        self._file = self._open()

    def close(self) -> None:
        with self._lock:
            try:
                self._file.close()
            except OSError:
                self.lost += 1

    def flush(self) -> None:
        with self._lock:
            try:
                self._file.flush()
            except OSError:
                self.lost += 1


def open_log(state_dir: Path, member: str, observe: ObserveConfig | None = None) -> structlog.typing.FilteringBoundLogger:
    """Sends this process's structlog and standard logging there; returns a logger bound to ``member``."""
    observe = observe or ObserveConfig()
    file = BoundedFile(log_path(state_dir, member), observe.log_bytes) if observe.log_to == "file" else sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),  # prompts, keys
    ]
    render = _renderer(observe)
    level = logging.getLevelNamesMapping()[observe.log_level.upper()]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=file),  # type: ignore[arg-type]  # it writes and flushes
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("moonpool").setLevel(level)
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(member=member)
    return logger


def _renderer(observe: ObserveConfig) -> structlog.typing.Processor:
    if observe.log_format == "json":
        return structlog.processors.JSONRenderer(sort_keys=False)
    return structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
