"""How near attention over pages comes to what the machine can read and multiply, for each backend that runs here.

    DTYPE_BACKEND_decode_CONTEXT_BATCH_gbs   K and V of that many tokens for each of BATCH rows, read once a layer
    ..._over_read                            over reading as fast as these threads can
    DTYPE_BACKEND_chunk_CONTEXT_gflops       512 new tokens against CONTEXT cached ones
    ..._over_gemm                            over a matrix product of the same dtype

What else a step does is taken out: each figure comes from the difference between a step with such a context and one with
none, and is left out where the context adds less than a tenth. The model is a random one with the heads of SmolLM2 (9 over
3, of 64) and next to no other weights. Steps go through the page memory in turn, so that K and V do not come from a cache.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.bench.tiny_model import TINY_IDS
from moonpool.core.blocks import blocks_for
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.engine.engine import Engine, Row, load_engine

CONTEXTS = (128, 1024, 8192)
BATCHES = (1, 4, 16)
CHUNK, PREFIXES = 512, (2048, 7680)
LAYERS, HEADS, KV_HEADS, DIM = 2, 9, 3, 64
BACKENDS = ("compiled", "fused", "torch")
_READ_BYTES = 256 << 20
_GEMM = 1024
_FILL = 0x3C  # of every byte: 0.0115 in bfloat16 and in float32


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    threads: int = 2
    rounds: int = 7
    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = BATCHES
    prefixes: tuple[int, ...] = PREFIXES
    backends: tuple[str, ...] = BACKENDS


def attention(options: AttentionOptions | None = None) -> dict[str, float]:
    """Best of ``rounds``. Backends that cannot serve here are left out."""
    options = options or AttentionOptions()
    torch.set_num_threads(options.threads)
    out = _machine(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder), max(options.contexts) + CHUNK)
        for dtype in ("bfloat16", "float32"):
            for backend in options.backends:
                with _engine(model, dtype, backend, options) as engine:
                    if engine is None:
                        continue
                    figures = {
                        **_decode(engine, options, out["read_gbs"]),
                        **_chunks(engine, options, out[f"{dtype}_gemm_gflops"]),
                    }
                out |= {f"{dtype}_{backend}_{name}": value for name, value in figures.items()}
    return out


def _machine(rounds: int) -> dict[str, float]:
    source = torch.ones(_READ_BYTES // 4)
    target = torch.empty_like(source)
    out = {
        "read_gbs": _READ_BYTES / _best(lambda: source.sum(), rounds) / 1e9,
        "copy_gbs": _READ_BYTES / _best(lambda: target.copy_(source), rounds) / 1e9,
    }
    for dtype in ("bfloat16", "float32"):
        square = torch.rand((_GEMM, _GEMM)).to(getattr(torch, dtype))
        out[f"{dtype}_gemm_gflops"] = 2 * _GEMM**3 / _best(lambda square=square: square @ square, rounds) / 1e9  # type: ignore[misc]
    return out


def _best(call: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def _model(folder: Path, context: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=TINY_IDS,
        hidden_size=16 * HEADS,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=context,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')  # there has to be one; no text is read
    return folder


@contextmanager
def _engine(model: Path, dtype: str, backend: str, options: AttentionOptions) -> Iterator[Engine | None]:
    """None where this backend cannot serve."""
    config = Config.model_validate({"model": {"path": str(model), "dtype": dtype}, "engine": {"backend": backend}})
    pages = max(options.batches) * blocks_for(max(options.contexts), config.engine.block_tokens)
    try:
        engine = load_engine(config, model, threads=options.threads, pages=pages, cache=model)
    except ConfigError:
        yield None
        return
    try:
        engine.kv_bytes[:] = _FILL  # untouched memory would be one page of zeros, in every cache
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def _decode(engine: Engine, options: AttentionOptions, read_gbs: float) -> dict[str, float]:
    out: dict[str, float] = {}
    for batch in options.batches:
        base = _step_seconds(engine, [1] * batch, 1, options.rounds)
        for context in options.contexts:
            taken = _step_seconds(engine, [context] * batch, 1, options.rounds) - base
            if taken < base / 10:
                continue
            rate = batch * context * engine.layout.token_bytes / taken / 1e9
            name = f"decode_{context}_{batch}_gbs"
            out |= {name: rate, f"{name}_over_read": rate / read_gbs}
    return out


def _chunks(engine: Engine, options: AttentionOptions, gemm_gflops: float) -> dict[str, float]:
    out: dict[str, float] = {}
    base = _step_seconds(engine, [CHUNK], CHUNK, options.rounds)
    for prefix in options.prefixes:
        taken = _step_seconds(engine, [prefix + CHUNK], CHUNK, options.rounds) - base
        if taken < base / 10:
            continue
        rate = 4 * LAYERS * HEADS * DIM * CHUNK * prefix / taken / 1e9
        name = f"chunk_{prefix}_gflops"
        out |= {name: rate, f"{name}_over_gemm": rate / gemm_gflops}
    return out


def _step_seconds(engine: Engine, ends: Sequence[int], count: int, rounds: int) -> float:
    """Of the best step in which each row computes the last ``count`` of its tokens; each step has the next pages."""
    size, total = engine.layout.block_tokens, engine.pages.total
    first = 0

    def step() -> None:
        nonlocal first
        rows = []
        for end in ends:
            table = [(first + i) % total for i in range(blocks_for(end, size))]
            first += len(table)
            rows.append(Row([1] * count, end - count, table, wants_logits=False))
        engine.forward(rows)

    return _best(step, rounds)
