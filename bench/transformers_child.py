"""Plain ``transformers`` in a process of its own: ``generate`` with its KV cache, sdpa attention, bf16, every core.

Reads one JSON command a line, answers one JSON line: {"op": "first_token", "tokens": n, "seed": s} or
{"op": "per_token", "batch": b, "prompt": n, "new": m, "seed": s} gives {"ms": x}; the first line says it is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

_IDS = (1_000, 32_000)  # of a small vocabulary, all but its first ids


def main() -> None:
    model_dir, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is not an answer
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    operations: dict[str, Callable[[Any, dict[str, int]], float]] = {"first_token": _first_token, "per_token": _per_token}
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), file=answers)
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps({"ms": operations[command.pop("op")](model, command)}), file=answers)


def _first_token(model: Any, command: dict[str, int]) -> float:
    return _generate_ms(model, _ids(model, 1, command["tokens"], command["seed"]), 1)


def _per_token(model: Any, command: dict[str, int]) -> float:
    """Time per token after the first: what ``new`` more tokens add to the first one, divided by their number."""
    ids = _ids(model, command["batch"], command["prompt"], command["seed"])
    first = _generate_ms(model, ids, 1)
    return (_generate_ms(model, ids, command["new"] + 1) - first) / command["new"]


def _ids(model: Any, batch: int, tokens: int, seed: int) -> torch.Tensor:
    size = model.config.vocab_size
    return torch.randint(
        min(_IDS[0], size // 2), min(_IDS[1], size), (batch, tokens), generator=torch.Generator().manual_seed(seed)
    )


def _generate_ms(model: Any, ids: torch.Tensor, new: int) -> float:
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
