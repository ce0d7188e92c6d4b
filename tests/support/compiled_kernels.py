"""Compiles the Triton kernels for an H100 (sm_90) down to machine code, which needs no GPU.

A process of its own, because that of the tests interprets them: ``python -m support.compiled_kernels``, one JSON object a line.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moonpool.engine.triton import attending, packing, writing

TARGET = GPUTarget("cuda", 90, 32)
INTEGERS = {"tile_span", "tile_first", "span_first", "span_count", "span_end", "tables", "token_span", "positions"}
TYPES = {"partials": "*fp32", "lses": "*fp32", "inner": "fp32", "outer": "fp32", "table": "*i64", "valid": "*i64"}
STORED = {"auto": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv"}
POINTERS = {"query", "query_rope", "out", "key", "value", "data"}


@dataclass(frozen=True)
class Kernel:
    name: str
    of: Any
    fixed: dict[str, object]
    warps: int = 4
    stages: int = 5
    numbers: str = "*bf16"

    def build(self) -> dict[str, object]:
        names = self.of.arg_names
        kind = str(self.fixed.get("KIND", "auto"))
        types = {name: "constexpr" if name in self.fixed else self._type(name, kind) for name in names}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if types[name].startswith("*") or name.endswith(("_head", "_token"))
        }
        source = ASTSource(self.of, types, {(names.index(n),): value for n, value in self.fixed.items()}, aligned)
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        made = triton.compile(source, target=TARGET, options=options)
        ptx = made.asm["ptx"]
        return {
            "name": self.name,
            "shared": made.metadata.shared,
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "asynchronous": ptx.count("cp.async.c"),
            **_usage(made.asm["cubin"]),
        }

    def _type(self, name: str, kind: str) -> str:
        if name in INTEGERS:
            return "*i32"
        if name == "pages":
            return self.numbers if kind == "auto" else STORED[kind]
        if name == "scales":
            return self.numbers if kind == "auto" else "*u8"
        return self.numbers if name in POINTERS else TYPES.get(name, "i32")


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of them that were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert found is not None, told.stdout
    return {"registers": int(found[1]), "spilled": int(found[2])}


def attention(values: int, share: int, rows: int, keys: int, **other: object) -> dict[str, object]:
    rope = int(str(other.get("ROPE", 0)))
    heads = 1 if rope else 8
    dims = max(16, triton.next_power_of_2(values))
    return {
        "LAYERS": 32,
        "KV_HEADS": heads,
        "FIRST": 0,
        "GAP": heads,
        "PLANES": 1 if rope else 2 * heads,
        "BLOCK": 64,
        "STRIDE": values + rope,
        "SHARE": share,
        "VALUES": values,
        "DIMS": dims,
        "ROPE": rope,
        "ROPES": max(16, triton.next_power_of_2(rope or values)),
        "WINDOWED": False,
        "CAPPED": False,
        "SPLIT": False,
        "KIND": "auto",
        "DOT": tl.bfloat16,
        "PRECISION": "ieee",
        "ROWS": rows,
        "KEYS": keys,
        **other,
    }


def written(width: int, kind: str, planes: int) -> dict[str, object]:
    padded = triton.next_power_of_2(width)
    heads = max(1, planes // 2)
    shape = {"LAYERS": 32, "FIRST": 0, "GAP": heads, "PLANES": planes, "BLOCK": 64, "WIDTH": width, "PADDED": padded}
    return {**shape, "VALUED": planes > 1, "KIND": kind, "TOKENS": 8}


def slices(kind: str, **other: object) -> dict[str, object]:
    shape = {"LAYERS": 32, "ROWS_A_SLICE": 16 * 64, "WIDTH": 128, "PADDED": 128, "KIND": kind, "ROWS": 32}
    return {**shape, **other}


def kernels() -> Iterator[Kernel]:
    for kind in ("auto", "int8", "fp8"):
        yield Kernel(f"answers {kind}", attending.attend, attention(128, 4, 16, 64, SPLIT=True, KIND=kind))
        yield Kernel(f"chunks {kind}", attending.attend, attention(128, 4, 128, 64, KIND=kind), warps=8, stages=3)
        yield Kernel(f"write {kind}", writing.write, written(128, kind, 16))
        yield Kernel(f"pack {kind}", packing._pack, slices(kind, BLOCK=64))
        yield Kernel(f"unpack {kind}", packing._unpack, slices(kind))
    windowed = attention(256, 2, 64, 32, WINDOWED=True, CAPPED=True)
    yield Kernel("chunks of 256, window and cap", attending.attend, windowed, warps=8, stages=3)
    yield Kernel("answers of 80", attending.attend, attention(80, 7, 16, 64, SPLIT=True, BLOCK=48))
    yield Kernel("answers, latents, 16 heads", attending.attend, attention(512, 16, 16, 32, SPLIT=True, ROPE=64))
    yield Kernel("answers, latents, 128 heads", attending.attend, attention(512, 128, 64, 32, SPLIT=True, ROPE=64), warps=8)
    yield Kernel("chunks, latents", attending.attend, attention(512, 128, 64, 32, ROPE=64), warps=8, stages=3)
    yield Kernel("write latents", writing.write, written(576, "auto", 1))
    whole = attention(128, 4, 64, 32, DOT=tl.float32)
    yield Kernel("chunks float32", attending.attend, whole, warps=8, stages=3, numbers="*fp32")
    shape = {"KV_HEADS": 8, "SHARE": 4, "VALUES": 128, "DIMS": 128, "ROWS": 16}
    yield Kernel("merge", attending.merge, {**shape, "SPLITS": 64, "COLUMNS": 128})


def main() -> None:
    for kernel in kernels():
        print(json.dumps(kernel.build()), flush=True)


if __name__ == "__main__":
    main()
