"""How a model is refused: by the field that names it, with the reason."""

from __future__ import annotations

from transformers import PreTrainedConfig

from moonpool.core.errors import UnsupportedModel


def refuse(what: str, fix: str = "use another model") -> UnsupportedModel:
    return UnsupportedModel(f"model.path: {what}; {fix}", param="model.path")


def one_number(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    try:
        value = getattr(config, name, None)
    except (ValueError, RuntimeError) as e:  # the library's word for a value that differs between layers
        raise refuse(f"config.json: {name} differs between layers, one number for all is needed") from e
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise refuse(f"config.json: {name} is {value!r}, one positive number for all layers is needed")
    return value
