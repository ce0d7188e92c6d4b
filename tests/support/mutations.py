"""Valid inputs gone wrong: what every decoder of foreign bytes has to stand.

``MOONPOOL_FUZZ=50`` in the environment makes tests fifty times as long.
"""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

from moonpool.core.errors import Bug, MoonpoolError

LONGER = int(os.environ.get("MOONPOOL_FUZZ", "1"))
PATIENCE_S = 10.0  # of CPU for one input of a few kilobytes: a hang, not a slow machine
ROOM_BYTES = 48 << 20  # for one such input
ODD_NUMBERS = tuple(
    n.to_bytes(size, "little", signed=n < 0)
    for size in (1, 2, 4, 8)
    for n in (0, 1, -1, (1 << (8 * size - 1)) - 1, -(1 << (8 * size - 1)))
)
NESTED = (
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"x = " + b"[" * 3_000,
    b"x = " + b"{a = " * 3_000,
    b"\x91" * 100_000,
    b"\x81\xa1a" * 30_000,
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1 << 70, -(1 << 70), 1e308, float("nan"), float("inf"),
    "", "x" * 3_000, "\0", "\ud800", "../../etc/passwd", [], {}, [[]], [None], {"a": {}}, [1, "a"],
)  # fmt: skip


def fuzzing(examples: int = 60) -> settings:
    """So many of them in the suite."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=examples * LONGER, deadline=None, suppress_health_check=quiet)


@st.composite
def mutated(draw: st.DrawFn, *seeds: bytes) -> bytes:
    """One of ``seeds`` after up to six changes: bits, cuts, splices of another seed, doubled parts, odd numbers, nesting."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, min(64, len(data) - at)))
        match draw(st.sampled_from(("bit", "byte", "cut", "drop", "splice", "double", "number", "text", "nest", "deep"))):
            case "bit" if data:
                data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "byte" if data:
                data[min(at, len(data) - 1)] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + size]
            case "splice":
                other = draw(st.sampled_from(seeds))
                start = draw(st.integers(0, len(other)))
                data[at : at + size] = other[start : start + draw(st.integers(0, 64))]
            case "double":
                data[at:at] = data[at : at + size]
            case "number":
                odd = draw(st.sampled_from(ODD_NUMBERS))
                data[at : at + len(odd)] = odd
            case "text":
                data[at:at] = draw(
                    st.sampled_from(
                        (b'"', b"{", b"}", b"[", b"]", b",", b"-", b"1e999", b"null", b"\n", b"\xff\xfe", b"9" * 5_000)
                    )
                )
            case "nest":
                data[at:at] = draw(st.sampled_from(NESTED))
            case "deep":
                data[:] = draw(st.sampled_from(NESTED))
    return bytes(data)


@st.composite
def odd_json(draw: st.DrawFn, *seeds: Any) -> bytes:
    """One of ``seeds`` (plain values) as JSON, with up to four of its values or keys replaced, removed or added."""
    value = json.loads(json.dumps(draw(st.sampled_from(seeds))))
    for _ in range(draw(st.integers(0, 4))):
        value = _changed(draw, value)
    return json.dumps(value).encode(errors="surrogatepass")


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with something odd somewhere in it."""
    inside = isinstance(value, dict | list) and len(value) and draw(st.integers(0, 4))
    if not inside:
        return draw(st.sampled_from(ODD_VALUES))
    if isinstance(value, list):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
    name = draw(st.sampled_from(sorted(value)))
    match draw(st.sampled_from(("change", "change", "change", "remove", "add"))):
        case "remove":
            return {k: v for k, v in value.items() if k != name}
        case "add":
            return value | {draw(st.sampled_from(("", "x", "__class__", name + "s"))): draw(st.sampled_from(ODD_VALUES))}
        case _:
            return value | {name: _changed(draw, value[name])}


def stands(decode: Callable[[], object], *, room: int = ROOM_BYTES) -> object:
    """What ``decode`` gave, or the error of ours that it raised: never another one, in bounded time and memory."""
    begun = time.thread_time()
    tracemalloc.start()
    try:
        return decode()
    except MoonpoolError as e:
        if isinstance(e, Bug):
            raise
        return e
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < room, f"{peak} bytes for one input"
        assert time.thread_time() - begun < PATIENCE_S, "it all but hangs"


def each(decoders: Sequence[Callable[[bytes], object]], data: bytes) -> list[object]:
    return [stands(lambda decode=decode: decode(data)) for decode in decoders]  # type: ignore[misc]
