"""How big the tiles are, for devices like H100 and H200: 132 multiprocessors, 227 KB of shared memory each, tensor cores that
take 16 rows (mma) or 64 (wgmma) at a time. Nothing here changes what is computed.

*Queries* of a tile. An answer's one token has as many as heads share a K/V head: padded to 16, the least that a tensor core
multiplies, and 64 at most (128 heads of latents are two such tiles). A chunk has 128, two warpgroups of wgmma each with 64,
where their sums fit into registers: 128 x 128 float32 are 64 of 255 registers of 256 threads. Wider heads, and float32,
take half.

*Keys* of a tile are a matter of shared memory (64 keys of K and V, 128 columns of bfloat16, are 32 KB a stage) and are
measured, together with warps and stages, once per model, machine and version of Triton; see ``CONFIGS``.

*Splits.* A step of few answers has fewer programs than the device has multiprocessors: keys are split among so many programs
that each multiprocessor has about four. More would read no faster, and every split costs its sums in memory once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moonpool.engine.triton.interpreting import INTERPRETED

NARROW_MOST = 64  # queries of an answer's tile
SPLITS_MOST = 64
SPLIT_KEYS = 256  # fewer are not worth a program of their own
PROGRAMS_EACH = 4  # of a multiprocessor
WRITTEN_TOKENS = 8  # of a program that writes K/V: 128 columns of bfloat16 are 16 bytes for each of its 128 threads

_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of one device."""

    wide: int  # queries of a chunk's tile, at most
    keys: int | None  # of a tile; None: measured
    split_keys: int
    programs: int  # that keep it busy


# The interpreter's tiles are small, so that a short prompt has several of them, and several splits.
_INTERPRETER = Tiling(wide=32, keys=32, split_keys=32, programs=8)


def tiling_of(device: torch.device) -> Tiling:
    if device.type != "cuda":
        return _INTERPRETER
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Tiling(wide=128, keys=16 if INTERPRETED else None, split_keys=SPLIT_KEYS, programs=PROGRAMS_EACH * processors)


def padded(columns: int) -> int:
    """Columns of a tile that holds so many: a power of two, and enough for a tensor core."""
    return max(16, 1 << (columns - 1).bit_length())


def narrow_rows(share: int) -> int:
    return min(NARROW_MOST, padded(share))


def wide_rows(tiling: Tiling, values: int, dtype: torch.dtype) -> int:
    """128 for up to 128 columns, 64 for 256 and for 512 (latents: 128 registers of 256 threads for sums alone)."""
    rows = 128 if padded(values) <= 128 else 64
    return min(tiling.wide, rows if dtype.itemsize <= 2 else rows // 2)


def splits_for(programs: int, longest: int | None, tiling: Tiling) -> int:
    """A power of two. ``programs`` without splits; ``longest``: keys that any of them has, None where that is open."""
    wanted = tiling.programs // max(programs, 1)
    if longest is not None:
        wanted = min(wanted, longest // tiling.split_keys)
    return 1 << max(0, min(wanted, SPLITS_MOST).bit_length() - 1)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What products are of. The interpreter knows no bfloat16: it would multiply the bits."""
    return tl.float32 if INTERPRETED else _DOT[dtype]


# Keys of a tile, warps, stages of the pipeline that loads ahead. Looking pages up is a stage of its own, so 5 stages keep two
# tiles in flight and 7 keep three. Answers are bound by memory: small tiles, with two to four programs a multiprocessor. Chunks
# are bound by the tensor cores: eight warps (two warpgroups), or four where 64 queries are all there is. What does not fit into
# shared memory is passed over when measured.
_ANSWERS = ((32, 4, 5), (32, 4, 7), (64, 4, 5), (64, 4, 7), (128, 4, 5))
_CHUNKS = ((32, 8, 3), (32, 8, 5), (64, 4, 5), (64, 8, 3), (64, 8, 5), (128, 8, 3))
CONFIGS = [
    triton.Config({"KEYS": keys}, num_warps=warps, num_stages=stages) for keys, warps, stages in sorted({*_ANSWERS, *_CHUNKS})
]


def fitting(configs: list[triton.Config], named: dict[str, object], **fixed: object) -> list[triton.Config]:
    """Those meant for tiles of so many queries, for the tuner; of 64, which both sorts have, all."""
    rows = int(str(fixed["ROWS"]))
    wanted = {*(_ANSWERS if rows <= 64 else ()), *(_CHUNKS if rows >= 64 else ())}
    return [one for one in configs if (one.kwargs["KEYS"], one.num_warps, one.num_stages) in wanted]


# What a best tile depends on; lengths and batches change from step to step and are left out.
TUNED_BY = ["ROWS", "SHARE", "VALUES", "ROPE", "BLOCK", "WINDOWED", "CAPPED", "SPLIT", "KIND"]
