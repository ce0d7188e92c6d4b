"""Codecs by name."""

from __future__ import annotations

from moonpool.core.errors import InvalidRequest
from moonpool.kvstore.codecs.codec import Codec
from moonpool.kvstore.codecs.fp8 import Fp8
from moonpool.kvstore.codecs.int8 import Int8
from moonpool.kvstore.codecs.raw import Raw

CODECS: dict[str, type[Codec]] = {"raw": Raw, "int8": Int8, "fp8": Fp8}


def make_codec(name: str) -> Codec:
    """InvalidRequest names those that there are."""
    if name not in CODECS:
        raise InvalidRequest(f"codec: {name!r} is unknown; use one of {', '.join(CODECS)}", param="codec")
    return CODECS[name]()
