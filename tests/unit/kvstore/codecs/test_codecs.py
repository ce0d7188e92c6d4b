"""Codecs against plain arithmetic: what comes back is within the bound that the format allows, for every kind of input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import SCALE_BYTES, KVLayout
from moonpool.kvstore.codecs.codec import can_be_coded, coded, decode, encode
from moonpool.kvstore.codecs.floats import from_floats, to_floats
from moonpool.kvstore.codecs.fp8 import Fp8, _quantise, _table
from moonpool.kvstore.codecs.make import CODECS, make_codec

DTYPES = ["float32", "float16", "bfloat16"]
LOSSY = ["int8", "fp8"]
# Half a step of the output's own dtype, relative; and its smallest step near zero.
OWN = {"float32": (2.0**-24, 2.0**-149), "float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}


def layout_of(
    dtype: str, layers: int = 2, heads: int = 2, dim: int = 4, tokens: int = 16, *, latents: bool = False
) -> KVLayout:
    if latents:
        return KVLayout("m", layers, 1, dim, dtype, tokens, kind="mla")
    return KVLayout("m", layers, heads, dim, dtype, tokens)


def to_bytes(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """By torch, so that our own conversions are not their own reference."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype)).reshape(-1)
    return tensor.view(torch.uint8).numpy().copy()


def to_values(data: NDArray[np.uint8], layout: KVLayout) -> NDArray[np.float64]:
    """float64 [layers, planes, block_tokens * head_dim]."""
    flat = torch.from_numpy(data).view(getattr(torch, layout.dtype)).to(torch.float64).numpy()
    return flat.reshape(layout.layers, layout.planes, -1)


def bound(name: str, layout: KVLayout, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each decoded value may be from the encoded one."""
    top = np.abs(values).max(axis=2, keepdims=True)
    own, smallest = OWN[layout.dtype]
    if name == "int8":
        quantised = np.full_like(values, 1.0) * np.maximum(top / 127, 2.0**-126) * 0.5
    else:
        step = np.maximum(top / 448, 2.0**-126)
        quantised = np.maximum(np.abs(values) / 16, step * 2.0**-10)
    return quantised * (1 + 1e-5) + own * np.abs(values) * 2 + smallest


@st.composite
def blocks(draw: st.DrawFn) -> tuple[KVLayout, NDArray[np.float32]]:
    """Planes of very different magnitude, some of zeros, some with outliers, some denormal."""
    shape = {"layers": draw(st.integers(1, 3)), "heads": draw(st.integers(1, 3)), "dim": draw(st.sampled_from([1, 3, 8]))}
    layout = layout_of(draw(st.sampled_from(DTYPES)), **shape, latents=draw(st.booleans()))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal((layout.layers, layout.planes, layout.block_tokens * layout.head_dim))
    low, high = {"float16": (-20, 9), "bfloat16": (-130, 120), "float32": (-145, 120)}[layout.dtype]
    values *= 2.0 ** rng.integers(low, high, values.shape[:2])[:, :, None]
    values[rng.random(values.shape[:2]) < 0.2] = 0
    spikes = rng.random(values.shape) < 0.02
    values[spikes] *= 16
    return layout, values.astype(np.float32)


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=60, deadline=None)
@given(block=blocks())
def test_what_comes_back_is_within_the_bound_of_the_format(name: str, block: tuple[KVLayout, NDArray[np.float32]]) -> None:
    layout, values = block
    codec, data = make_codec(name), to_bytes(values, layout.dtype)
    before = data.copy()
    small = encode(codec, layout, data)
    assert small is not None
    assert (data == before).all()
    assert len(small) == coded(layout, name).block_bytes
    meant, came = to_values(data, layout), to_values(decode(codec, layout, small), layout)
    assert np.isfinite(came).all()
    assert (np.abs(came - meant) <= bound(name, layout, meant)).all()
    assert (np.abs(came).max(axis=2) <= np.abs(meant).max(axis=2) * (1 + 2.0**-8) + 2.0**-121).all()


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=30, deadline=None)
@given(block=blocks())
def test_encoding_again_what_was_decoded_loses_no_more_than_the_dtype_does(
    name: str, block: tuple[KVLayout, NDArray[np.float32]]
) -> None:
    """As it happens where a decoded prefix is handed to another node, and compressed there."""
    layout, values = block
    codec, data = make_codec(name), to_bytes(values, layout.dtype)
    once = encode(codec, layout, data)
    assert once is not None
    back = decode(codec, layout, once)
    twice = encode(codec, layout, back)
    assert twice is not None
    first, second = to_values(back, layout), to_values(decode(codec, layout, twice), layout)
    top = np.abs(first).max(axis=2, keepdims=True)
    sound = top > 2.0**-14 if layout.dtype == "float16" else top > 2.0**-118  # below, the dtype itself has few digits
    own, smallest = OWN[layout.dtype]
    assert (np.abs(second - first) * sound <= (4 * own + 1e-5) * np.abs(first) + smallest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_the_largest_values_of_a_dtype_stay_finite_and_zeros_stay_zero(name: str, dtype: str) -> None:
    layout = layout_of(dtype)
    largest = torch.finfo(getattr(torch, dtype)).max
    values = np.zeros((2, 4, 64), np.float32)
    values[0, 0, ::2], values[0, 0, 1::2] = largest, -largest
    small = encode(make_codec(name), layout, to_bytes(values, dtype))
    assert small is not None
    came = to_values(decode(make_codec(name), layout, small), layout)
    assert came[0, 0] == pytest.approx(to_values(to_bytes(values, dtype), layout)[0, 0], rel=0.01)
    assert not came[1:].any()
    assert not came[0, 1:].any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_a_block_with_a_value_that_is_not_finite_is_not_encoded(name: str, dtype: str, bad: float) -> None:
    layout = layout_of(dtype)
    values = np.ones((2, 4, 64), np.float32)
    values[1, 3, 17] = bad
    assert encode(make_codec(name), layout, to_bytes(values, dtype)) is None


@given(data=st.binary(min_size=2 * 4 * 64 * 2, max_size=2 * 4 * 64 * 2))
def test_raw_keeps_every_byte(data: bytes) -> None:
    layout, codec = layout_of("bfloat16"), make_codec("raw")
    block = np.frombuffer(data, np.uint8)
    small = encode(codec, layout, block)
    assert small is not None
    assert bytes(small) == bytes(decode(codec, layout, small)) == data
    assert not codec.lossy


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.25), ("bfloat16", 0.5)])
def test_an_encoded_slice_is_one_byte_an_element_and_a_scale_for_each_head(dtype: str, share: float) -> None:
    layout = layout_of(dtype, layers=3, heads=2, dim=64, tokens=64)
    for name in LOSSY:
        small = coded(layout, name)
        assert small.slice_bytes == 2 * 2 * (64 * 64 + SCALE_BYTES)
        assert small.block_bytes == pytest.approx(share * layout.block_bytes, rel=0.002)
        assert (small.token_bytes, small.pieces(64)) == (3 * 2 * 2 * 64, [(0, small.slice_bytes)])
        with pytest.raises(InvalidRequest, match="whole blocks only"):
            small.pieces(63)


def test_fp8_rounds_as_the_format_says() -> None:
    """Every value between two codes goes to the nearer one, a tie to the even one, by torch's own conversion."""
    rng = np.random.default_rng(5)
    positive = np.sort(np.unique(np.abs(_table())))
    ties = ((positive[1:].astype(np.float64) + positive[:-1]) / 2).astype(np.float32)
    around = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    values = np.concatenate([around, -around, positive, -positive, rng.uniform(-448, 448, 2000).astype(np.float32)])
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert (_quantise(values.copy()) == theirs.view(torch.uint8).numpy()).all()
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    assert (_table()[codes] == torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_converted_as_torch_converts_them(dtype: str) -> None:
    layout = layout_of(dtype, layers=1)
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 2**32, 4 * 64, dtype=np.uint32) & np.uint32(0xBFFFFFFF)  # finite, at most 2
    bits[::3] = bits[::3] & np.uint32(0xFFFF0000) | np.uint32(0x8000)  # ties of bfloat16
    values = bits.view(np.float32).reshape(4, 64)
    into = np.empty(layout.slice_bytes, np.uint8)
    from_floats(layout, values.copy(), into)
    assert (into == to_bytes(values, dtype)).all()
    assert (to_floats(layout, into) == to_values(into, replace(layout, layers=1))[0]).all()


def test_two_codecs_of_one_kind_share_nothing_and_names_are_known() -> None:
    assert make_codec("fp8") is not make_codec("fp8")
    assert {make_codec(name).name for name in CODECS} == set(CODECS)
    with pytest.raises(InvalidRequest, match="'zip' is unknown; use one of raw, int8, fp8"):
        make_codec("zip")


def test_what_a_codec_wrote_is_never_encoded_again_and_other_orders_are_refused() -> None:
    layout = layout_of("bfloat16")
    once = coded(layout, "int8")
    assert once.fingerprint != layout.fingerprint
    with pytest.raises(InvalidRequest, match="never encoded again"):
        encode(Fp8(), once, np.zeros(once.block_bytes, np.uint8))
    with pytest.raises(InvalidRequest, match="canonical order, not bfloat16 in order 'dot_product'"):
        coded(replace(layout, order="dot_product"), "fp8")
    assert [can_be_coded(one) for one in (layout, once, replace(layout, dtype="uint8"))] == [True, False, False]
