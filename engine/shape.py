"""What a configuration file promises about K/V, read without the library where the file says it all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.core.layout import KV, KVLayout
from moonpool.core.parsing import read_json

# Families whose configuration means what its numbers say. Whether ``head_dim`` may be left out, to be hidden_size // heads.
PLAIN = {
    "llama": True,
    "mistral": True,
    "mixtral": True,
    "qwen2": True,
    "qwen2_moe": True,
    "qwen3": False,
    "qwen3_moe": False,
    "gemma": False,
    "gemma2": False,
    "gemma3_text": False,
}
_NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the configuration file promises about K/V."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: str = KV  # of ``KVLayout``

    def layout(self, model: str, dtype: str, block_tokens: int) -> KVLayout:
        """``model``: its fingerprint."""
        return KVLayout(model, self.layers, self.kv_heads, self.head_dim, dtype, block_tokens, kind=self.kind)


def shape_in_file(model_dir: Path) -> Shape | None:
    """None where the library has to be asked, which takes seconds to import: for other families, and for what has a default
    there. It does not judge: a model that the engine refuses is refused by the engine.
    """
    try:
        raw = read_json((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or str(raw.get("model_type")) not in PLAIN or "text_config" in raw:
        return None
    layers, heads, kv_heads, hidden = (_count(raw.get(name)) for name in (*_NUMBERS, "hidden_size"))
    head_dim = _count(raw.get("head_dim"))
    if raw.get("head_dim") is None and PLAIN[raw["model_type"]] and heads:
        head_dim = hidden // heads
    return Shape(layers, heads, kv_heads, head_dim) if layers and heads and kv_heads and head_dim else None


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
