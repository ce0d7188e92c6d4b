"""The block as it is."""

from __future__ import annotations

from moonpool.core.layout import RAW as NAME
from moonpool.core.layout import KVLayout
from moonpool.kvstore.codecs.codec import Bytes


class Raw:
    name = NAME
    lossy = False

    def encode(self, layout: KVLayout, full: Bytes, into: Bytes) -> bool:
        into[:] = full
        return True

    def decode(self, layout: KVLayout, coded: Bytes, into: Bytes) -> None:
        into[:] = coded
