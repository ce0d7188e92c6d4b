"""What the codecs cost on a real model's KV: size, error, speed, and how much likelier the text was without them.

A text's first half is prefilled; the second half is then scored token by token, once over the KV as it was computed and
once over what came back from each codec. ``nll_added`` is the difference of the mean negative log-likelihoods, in nats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moonpool import bench
from moonpool.core.blocks import blocks_for
from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.layout import KVLayout
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.kvstore.codecs.codec import Bytes, Codec, coded, decode, encode
from moonpool.kvstore.codecs.floats import to_floats
from moonpool.kvstore.codecs.make import make_codec

CODECS = ("int8", "fp8")


def codecs(*, model: str = "smollm2", text: str = "", tokens: int = 1024, scored: int = 96) -> dict[str, float]:
    """``text`` is a file; by default the sources of this package. Half of ``tokens``, in whole blocks, is prefilled."""
    from moonpool.cluster.models import local_model

    directory = local_model(model, lambda _: None)
    config = Config(model=ModelConfig(path=model), engine=EngineConfig(threads=2))
    engine = load_engine(config, directory, threads=2, pages=blocks_for(2 * tokens, config.engine.block_tokens))
    try:
        return _measure(engine, _ids(directory, text, tokens), scored)
    finally:
        engine.close()


def _ids(directory: Path, text: str, tokens: int) -> list[int]:
    from transformers import AutoTokenizer

    sources = sorted(Path(bench.__file__).parent.glob("*.py"))
    prose = Path(text).read_text() if text else "\n\n".join(source.read_text() for source in sources)
    ids: list[int] = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).encode(prose)
    return ids[:tokens]


def _measure(engine: Engine, ids: Sequence[int], scored: int) -> dict[str, float]:
    layout = engine.layout
    begin = len(ids) // 2 // layout.block_tokens * layout.block_tokens
    table = engine.pages.allocate(blocks_for(len(ids), layout.block_tokens))
    engine.forward([Row(ids[:begin], 0, table, False)])
    prefix = table[: begin // layout.block_tokens]
    full = [engine.kv_bytes[page].reshape(-1).copy() for page in prefix]
    ends = range(begin, min(begin + scored, len(ids) - 1))
    plain = _nll(engine, ids, table, ends)
    out: dict[str, float] = {"tokens": float(begin), "scored": float(len(ends)), "nll": plain}
    for name in CODECS:
        codec = make_codec(name)
        small, seconds = _encoded(codec, layout, full)
        begun = time.perf_counter()
        back = [decode(codec, layout, one) for one in small]
        decoding = time.perf_counter() - begun
        for page, one in zip(prefix, back, strict=True):
            engine.kv_bytes[page] = one.reshape(layout.layers, layout.slice_bytes)
        own = {
            "size_ratio": coded(layout, name).slot_bytes / layout.slot_bytes,
            "encode_gbs": sum(map(len, full)) / seconds / 1e9,
            "decode_gbs": sum(map(len, full)) / decoding / 1e9,
            "nll_added": _nll(engine, ids, table, ends) - plain,
            **_errors(layout, full, back),
        }
        out |= {f"{name}_{key}": value for key, value in own.items()}
    return out


def _encoded(codec: Codec, layout: KVLayout, blocks: Sequence[Bytes]) -> tuple[list[Bytes], float]:
    begun = time.perf_counter()
    small = [encode(codec, layout, one) for one in blocks]
    return [one for one in small if one is not None], time.perf_counter() - begun


def _nll(engine: Engine, ids: Sequence[int], table: list[int], ends: range) -> float:
    """Mean negative log-likelihood of the token after each of ``ends``."""
    total = 0.0
    for end in ends:
        logits = engine.forward([Row([ids[end]], end, table, True)])
        total -= float(torch.log_softmax(logits[0], dim=0)[ids[end + 1]])
    return total / len(ends)


def _errors(layout: KVLayout, full: Sequence[Bytes], back: Sequence[Bytes]) -> dict[str, float]:
    """Relative to each head's largest magnitude (``max_error``), and of all values in the root mean square (``rms``)."""
    worst = squares = energy = 0.0
    for one, other in zip(full, back, strict=True):
        for layer in range(layout.layers):
            cut = slice(layer * layout.slice_bytes, (layer + 1) * layout.slice_bytes)
            meant, came = to_floats(layout, one[cut]), to_floats(layout, other[cut])
            off = np.abs(meant - came)
            worst = max(worst, float((off.max(axis=1) / np.abs(meant).max(axis=1)).max()))
            squares += float(np.square(off, dtype=np.float64).sum())
            energy += float(np.square(meant, dtype=np.float64).sum())
    return {"max_error_of_head_max": worst, "rms_error": (squares / energy) ** 0.5}
