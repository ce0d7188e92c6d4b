"""What the gateway must know of the model besides its tokenizer: read from config.json, no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError
from moonpool.core.parsing import read_json
from moonpool.engine.checkpoint import require_model


@dataclass(frozen=True, slots=True)
class ModelFacts:
    max_context: int  # tokens of prompt and output together
    vocab_size: int  # rows of the embedding: ids below it are valid
    eos_ids: frozenset[int] = frozenset()  # end-of-sequence ids, as workers take them from the same files


def read_facts(model_dir: Path, *, max_context: int) -> ModelFacts:
    """``max_context`` is the configured limit; 0: the model's own. ConfigError where the directory does not say."""
    require_model(model_dir)
    path, generation = model_dir / "config.json", model_dir / "generation_config.json"
    raw = _read(path)
    nested = raw.get("text_config")  # multimodal models nest their language model
    text = nested if isinstance(nested, dict) else raw
    own = _number(text, "max_position_embeddings", "n_positions", "max_seq_len")
    vocab = _number(text, "vocab_size")
    if not vocab or not (own or max_context):
        raise ConfigError(
            f"model.path: {path} names no vocab_size or no context length; set model.max_context", param="model.path"
        )
    limit = min(own, max_context) if own and max_context else own or max_context
    ends = frozenset(_ids(raw) + _ids(text) + (_ids(_read(generation)) if generation.is_file() else []))
    return ModelFacts(max_context=limit, vocab_size=vocab, eos_ids=ends)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_json(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"model.path: cannot read {path}: {e}; give a Hugging Face model directory", param="model.path"
        ) from e
    return raw


def _ids(values: dict[str, Any]) -> list[int]:
    """One id or a list of them."""
    found = values.get("eos_token_id")
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def _number(values: dict[str, Any], *names: str) -> int:
    return next((int(values[n]) for n in names if isinstance(values.get(n), int)), 0)
