"""What callers give the library, checked before anything is sent: a wrong argument costs neither a value nor the connection.

Every InvalidRequest names the argument, what was given, and what to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from reprlib import repr as short
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import KVLayout
from moonpool.kvstore.library import values
from moonpool.kvstore.library.objects import CLASSES, MAX_BYTES, SLOT_MORE, chunks_of, class_of

MAX_NAME = 256  # bytes of a namespace or a tenant
MAX_U32 = 2**32 - 1
_LARGER = "or start the store node with a larger pool (`moonpool store serve --pool`, store.pool_bytes)"


class Named(NamedTuple):
    """One value to put; ``bytes`` as it will be stored."""

    name: bytes
    value: Any
    bytes: int


def _refuse(param: str, given: object, what: str) -> NoReturn:
    raise InvalidRequest(f"{param}: {short(given)} is {type(given).__name__}; {what}", param=param)


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{param}: {short(text)} is no text that UTF-8 can hold ({e.reason})", param=param) from e


def name(given: object, param: str) -> str:
    """A namespace or a tenant."""
    if not isinstance(given, str):
        _refuse(param, given, "give a str")
    if not 1 <= (size := len(_utf8(given, param))) <= MAX_NAME:
        raise InvalidRequest(f"{param}: {short(given)} has {size} bytes; give 1 to {MAX_NAME}", param=param)
    return given


def milliseconds(given: object, param: str) -> int:
    try:
        number = -1 if isinstance(given, bool) else index(given)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_U32:
        _refuse(param, given, f"give whole milliseconds, 0 to {MAX_U32}")
    return number


def user_key(key: object) -> bytes:
    if isinstance(key, bytes):
        return key
    if not isinstance(key, str):
        _refuse("key", key, "give a str or bytes; to name several, use the call for many")
    return _utf8(key, "key")


def listed(given: object, param: str, example: str) -> list[Any]:
    """The members of a list, or of whatever else can be gone through; text and bytes are no lists of keys."""
    if isinstance(given, str | bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        _refuse(param, given, f"give a list, as in {example}")
    return list(given)


def user_keys(keys: object) -> list[bytes]:
    return [user_key(key) for key in listed(keys, "keys", 'get_many(["a", "b"])')]


def pairs(given: object, param: str, example: str) -> list[tuple[Any, Any]]:
    out = listed(given, param, example)
    for at, one in enumerate(out):
        if not isinstance(one, tuple | list) or len(one) != 2:
            _refuse(f"{param}[{at}]", one, f"give pairs, as in {example}")
    return out


def named_values(items: object) -> list[Named]:
    """All of ``items``, or InvalidRequest for the first that cannot be stored, which names its key."""
    out = []
    for key, value in pairs(items, "items", 'put_many([("a", b"1"), ("b", b"2")])'):
        named = user_key(key)
        try:
            size = values.size_of(value)
        except InvalidRequest as e:
            raise InvalidRequest(f"{e.message} (key {short(key)})", param="value") from e
        if size > MAX_BYTES:
            raise InvalidRequest(f"value: {size} bytes (key {short(key)}); give at most {MAX_BYTES}", param="value")
        out.append(Named(named, value, size))
    return out


def require_room(items: Sequence[Named], regions: Sequence[int]) -> None:
    """InvalidRequest where even an empty pool, of regions of these sizes, could not hold all of ``items`` at once."""
    pool = sum(regions)
    if 2 * sum(one.bytes for one in items) + 2 * SLOT_MORE * len(items) < pool // 2:
        return  # no value takes more than twice its size and two pages, and the waste of regions is below a half
    needed = 0
    for one in items:
        chunks, slot = chunks_of(one.bytes), CLASSES[class_of(one.bytes)] + SLOT_MORE
        needed += chunks * slot
        if chunks > sum(size // slot for size in regions):
            raise InvalidRequest(
                f"value: {one.bytes} bytes (key {short(one.name)}) take {chunks * slot} of the pool, which has {pool} in all; "
                f"store less in one value, {_LARGER}",
                param="value",
            )
    if needed > pool:
        raise InvalidRequest(
            f"items: {len(items)} values take {needed} bytes of the pool, which has {pool} in all; put fewer in one call, "
            f"{_LARGER}",
            param="items",
        )


# Blocks of KV.


def block_key(key: object, param: str = "keys") -> bytes:
    if not isinstance(key, bytes):
        _refuse(param, key, f"a block key is bytes, {KEY_BYTES} of them")
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{param}: a block key has {KEY_BYTES} bytes, {short(key)} has {len(key)}", param=param)
    return key


def block_keys(keys: object) -> list[bytes]:
    return [block_key(key) for key in listed(keys, "keys", "lookup_blocks([key, ...])")]


def layout(given: object) -> KVLayout:
    if not isinstance(given, KVLayout):
        _refuse("layout", given, "give a moonpool.core.layout.KVLayout")
    for field in ("layers", "kv_heads", "head_dim", "block_tokens"):
        number = getattr(given, field)
        if not isinstance(number, int) or not 1 <= number <= MAX_U32:
            _refuse(f"layout.{field}", number, "give a whole number, 1 or more")
    for field in ("model", "dtype", "order", "digest", "codec", "kind"):
        word = getattr(given, field)
        if not isinstance(word, str):
            _refuse(f"layout.{field}", word, "give a str")
        _utf8(word, f"layout.{field}")
    return given


def block(of: KVLayout, given: object, param: str) -> NDArray[np.uint8]:
    """[block_bytes], contiguous."""
    if not isinstance(given, np.ndarray) or isinstance(given, np.ma.MaskedArray):
        _refuse(param, given, f"give numpy arrays, uint8 [{of.block_bytes}]")
    if given.dtype != np.uint8 or given.shape != (of.block_bytes,):
        raise InvalidRequest(
            f"{param}: {given.dtype} of shape {given.shape} where uint8 [{of.block_bytes}] is a block", param=param
        )
    return np.ascontiguousarray(given)


def blocks(of: KVLayout, given: object) -> list[tuple[bytes, NDArray[np.uint8]]]:
    each = pairs(given, "blocks", "put_blocks(layout, [(key, block), ...])")
    return [(block_key(key), block(of, one, "blocks")) for key, one in each]


def require_room_for_blocks(of: KVLayout, count: int, regions: Sequence[int]) -> None:
    """As ``require_room``."""
    if (needed := count * of.slot_bytes) > (pool := sum(regions)):
        raise InvalidRequest(
            f"blocks: {count} take {needed} bytes of the pool, which has {pool} in all; put fewer in one call, {_LARGER}",
            param="blocks",
        )


def block_targets(of: KVLayout, into: object) -> list[NDArray[np.uint8]]:
    """Writable, [block_bytes] each."""
    out = [(given, block(of, given, "into")) for given in listed(into, "into", "get_blocks(layout, keys, [block, ...])")]
    for given, one in out:
        if one is not given or not one.flags.writeable:
            raise InvalidRequest(
                "into: a block is read-only or not contiguous; give np.empty(layout.block_bytes, np.uint8)", param="into"
            )
    return [one for _, one in out]
