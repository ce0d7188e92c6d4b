"""How a model is refused: by the field that names it, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig

from moonpool.core.errors import MoonpoolError, UnsupportedModel

MEND = "correct it, or fetch the model again"


def refuse(what: str, fix: str = "use another model") -> UnsupportedModel:
    return UnsupportedModel(f"model.path: {what}; {fix}", param="model.path")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """UnsupportedModel, with ``what`` failed, for anything that the library raises: its code divides by, and indexes with, what
    a file says, so there is no list of what a wrong number ends in. Errors of ours pass."""
    try:
        yield
    except MoonpoolError:
        raise
    except Exception as e:
        raise refuse(f"{what}: {str(e) or type(e).__name__}") from e


def one_number(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    try:
        value = getattr(config, name, None)
    except (ValueError, RuntimeError) as e:  # the library's word for a value that differs between layers
        raise refuse(f"config.json: {name} differs between layers, one number for all is needed") from e
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise refuse(f"config.json: {name} is {value!r}, one positive number for all layers is needed", MEND)
    return value
