"""KV layout: the one byte order of a block in device pages, pool slots, and on the wire.

A block of kind ``kv`` is ``[layer][k|v][kv_head][token][head_dim]``. One of kind ``mla`` (multi-head latent attention,
DeepSeek-V2) is ``[layer][token][head_dim]``: for all heads one row per token, the normed latent and then the rotated key.
Either way a block is ``[layer][plane][token][head_dim]``. So a block is contiguous, each *layer slice* is contiguous, and
for each plane the first ``valid`` tokens of a slice are contiguous: a slice with ``valid`` tokens is ``planes`` pieces of
``valid * head_dim`` elements, or one piece when the block is full.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property

from moonpool.core.errors import ConfigError, InvalidRequest, LayoutMismatch

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
KV, MLA = "kv", "mla"  # kinds
RAW = "raw"
CODED_ITEM_BYTES = {"fp8": 1, "int8": 1}  # of copies that a codec wrote, whatever the dtype that they decode to
SCALE_BYTES = 4  # one scale for each plane, before the elements of a coded slice
DIGEST_BYTES = 8
SLOT_ALIGN = 4096  # direct I/O and huge pages want it; a slot never straddles two regions


@dataclass(frozen=True)
class KVLayout:
    model: str  # model fingerprint, hex: BLAKE2b over config and weight bytes
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 64
    order: str = "canonical"
    digest: str = "xxh3_64"
    codec: str = RAW  # else: a smaller copy of such blocks, see kvstore.codecs; it has whole blocks only
    kind: str = KV  # of ``mla``: ``head_dim`` is the width of a token's row, and there is one head

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= 512:
            raise ConfigError(f"block_tokens: {self.block_tokens} is out of range; use 16 to 512", param="block_tokens")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype: {self.dtype!r} is unknown; use one of {sorted(ITEM_BYTES)}", param="dtype")
        if self.codec != RAW and self.codec not in CODED_ITEM_BYTES:
            raise ConfigError(f"codec: {self.codec!r} is unknown; use one of {[RAW, *CODED_ITEM_BYTES]}", param="codec")
        if self.kind not in (KV, MLA):
            raise ConfigError(f"kind: {self.kind!r} is unknown; use {KV} or {MLA}", param="kind")
        if self.kind == MLA and self.kv_heads != 1:
            raise ConfigError(
                f"kv_heads: {self.kv_heads} of kind {MLA}, which has one row for all heads; use 1", param="kv_heads"
            )

    @cached_property
    def planes(self) -> int:
        """Of a layer slice: K of each head, then V of each head; or the one plane of latents."""
        return 2 * self.kv_heads if self.kind == KV else 1

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.head_dim * CODED_ITEM_BYTES.get(self.codec, ITEM_BYTES[self.dtype])

    @cached_property
    def slice_bytes(self) -> int:
        scales = 0 if self.codec == RAW else self.planes * SCALE_BYTES
        return scales + self.planes * self.block_tokens * self.row_bytes

    @cached_property
    def block_bytes(self) -> int:
        return self.layers * self.slice_bytes

    @cached_property
    def token_bytes(self) -> int:
        return self.layers * self.planes * self.row_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """A pool slot: the block, then a trailer of one digest per layer, rounded up to ``SLOT_ALIGN``."""
        raw = self.block_bytes + self.layers * DIGEST_BYTES
        return -(-raw // SLOT_ALIGN) * SLOT_ALIGN

    def pieces(self, valid: int) -> list[tuple[int, int]]:
        """(offset, length) in bytes, inside a layer slice, of its first ``valid`` tokens."""
        if valid == self.block_tokens:
            return [(0, self.slice_bytes)]
        if self.codec != RAW:
            raise InvalidRequest(
                f"valid: {valid} tokens of a block that {self.codec} wrote; it has whole blocks only", param="valid"
            )
        stride = self.block_tokens * self.row_bytes
        return [(i * stride, valid * self.row_bytes) for i in range(self.planes)]

    @cached_property
    def fingerprint(self) -> str:
        """Of kind ``kv`` as it was before there was another, so that blocks of that time are found."""
        fields = {name: value for name, value in asdict(self).items() if name != "kind" or value != KV}
        text = ";".join(f"{k}={v}" for k, v in sorted(fields.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def require_same(self, other: KVLayout, who: str) -> None:
        """LayoutMismatch naming every differing field, both values, unless equal."""
        if self == other:
            return
        mine, theirs = asdict(self), asdict(other)
        diff = ", ".join(f"{k} {mine[k]!r} here, {theirs[k]!r} at {who}" for k in mine if mine[k] != theirs[k])
        raise LayoutMismatch(f"KV layout differs: {diff}; start both with the same model, dtype and block_tokens")
