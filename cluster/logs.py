"""Structured logs: one JSON object a line, one file per process (``<state_dir>/logs/<member>.log``)."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog


def log_path(state_dir: Path, member: str) -> Path:
    return state_dir / "logs" / f"{member}.log"


def open_log(state_dir: Path, member: str) -> structlog.typing.FilteringBoundLogger:
    """Sends this process's structlog and standard logging there, appending; returns a logger bound to ``member``."""
    path = log_path(state_dir, member)
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a", buffering=1, encoding="utf-8")
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),  # prompts, keys
    ]
    render = structlog.processors.JSONRenderer(sort_keys=False)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(member=member)
    return logger
