"""Products in the matrix unit of a CPU (AMX), against sums in float64, and what happens where the kernel denies the unit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_runner import assert_nearer_than_the_library, rounded_tiny
from engine_runner import VOCAB, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from transformers import LlamaConfig

from moonpool.engine.compiled import matrix, tiles
from moonpool.engine.compiled.cpu import has_matrix_unit, may_use_matrix_unit
from moonpool.engine.compiled.lanes import FLAGS, address
from moonpool.engine.compiled.packing import pack

pytestmark = pytest.mark.skipif(not has_matrix_unit(), reason="this CPU has no matrix unit for bf16 (AMX)")

KEYS = 32
Bits = NDArray[np.int16]


@pytest.fixture(scope="module")
def allowed() -> None:
    """Without, its first instruction ends the process."""
    if not may_use_matrix_unit():
        pytest.skip("the kernel denies the matrix unit")


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _bits(tensor: torch.Tensor) -> Bits:
    return tensor.contiguous().view(torch.int16).numpy()


def _products(rows: int, groups: int) -> Callable[..., None]:
    tile = matrix.product(rows, groups)

    @njit(**{**FLAGS, "cache": False})
    def run(shape, weights, x, inputs, bias, out, outputs):  # type: ignore[no-untyped-def]
        matrix.configure(address(shape))
        tile(address(weights), address(x), inputs * 2, inputs, address(bias), address(out), outputs * 4)
        matrix.release()

    return run  # type: ignore[no-any-return]


PRODUCTS = {(rows, groups): _products(rows, groups) for rows, groups in ((2, 2), (2, 1), (1, 4), (1, 2), (1, 1))}


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int) -> NDArray[np.float32]:
    """Of the first 16 * ``groups`` outputs, with registers of as many rows as there are tokens."""
    tokens, inputs = x.shape
    tiles_of_rows = -(-tokens // matrix.TILE_ROWS)
    held = torch.full((tiles_of_rows * matrix.TILE_ROWS, inputs), float("nan"), dtype=torch.bfloat16)
    held[:tokens] = x
    shape = np.ascontiguousarray(matrix.shapes()[min(tokens, matrix.TILE_ROWS)])
    out = np.zeros((len(held), tiles.GROUP * groups), np.float32)
    weights, bits = _bits(pack(weight)).reshape(-1), _bits(held)
    PRODUCTS[tiles_of_rows, groups](shape, weights, bits, inputs, bias.numpy(), out, out.shape[1])
    return out[:tokens]


@pytest.mark.usefixtures("allowed")
@settings(max_examples=40)
@given(st.integers(1, 32), st.sampled_from((32, 64, 96, 576)), st.integers(0, 2**31))
def test_products_are_sums_in_one_order_whatever_else_is_computed_along(tokens: int, inputs: int, seed: int) -> None:
    x, weight, bias = _numbers(seed, tokens, inputs), _numbers(seed + 1, 64, inputs), _numbers(seed + 2, 64).float()
    want = x.double() @ weight.double().T + bias
    wide = [_product(x, weight, bias, groups) for groups in ((1, 2) if tokens > matrix.TILE_ROWS else (1, 2, 4))]
    np.testing.assert_allclose(wide[-1], want[:, : wide[-1].shape[1]].float(), rtol=1e-5, atol=1e-6 * inputs)
    for narrow in wide:
        np.testing.assert_array_equal(narrow, wide[-1][:, : narrow.shape[1]])
    alone = _product(x[-1:], weight, bias, 1)
    np.testing.assert_array_equal(alone[0], wide[0][-1])


def _attending(rows: int) -> Callable[..., None]:
    score, weigh = matrix.scores(rows), matrix.weighted(rows)

    @njit(**{**FLAGS, "cache": False})
    def run(shape, queries, keys, dim, packed, out, weights, values, interleaved, sums):  # type: ignore[no-untyped-def]
        matrix.configure(address(shape))
        for half in range(0, KEYS * dim * 2, tiles.TILE_KEYS * dim * 2):
            tiles.transpose_keys(address(keys) + half, dim, address(packed) + half)
            tiles.interleave_values(address(values) + half, dim, address(interleaved) + half)
        score(address(queries), address(packed), dim, address(out), KEYS * 4)
        for column in range(0, dim * 4, 128):
            weigh(address(weights), KEYS * 2, address(interleaved) + column, dim * 4, 1, address(sums) + column, dim * 4)
        matrix.release()

    return run  # type: ignore[no-any-return]


ATTENDING = {rows: _attending(rows) for rows in (1, 2)}


@pytest.mark.usefixtures("allowed")
@settings(max_examples=30)
@given(st.integers(1, 32), st.sampled_from((32, 64, 96, 128)), st.integers(0, 2**31))
def test_scores_and_weighted_values_are_those_of_their_formulas(rows: int, dim: int, seed: int) -> None:
    tiles_of_rows = -(-rows // matrix.TILE_ROWS)
    held = tiles_of_rows * matrix.TILE_ROWS
    queries, keys, values = _numbers(seed, held, dim), _numbers(seed + 1, KEYS, dim), _numbers(seed + 2, KEYS, dim)
    weights, before = _numbers(seed + 3, held, KEYS), _numbers(seed + 4, held, dim).float()
    out, sums = np.zeros((held, KEYS), np.float32), before.numpy().copy()
    shape = np.ascontiguousarray(matrix.shapes()[min(rows, matrix.TILE_ROWS)])
    room = np.zeros((2, KEYS * dim), np.int16)
    ATTENDING[tiles_of_rows](
        shape, _bits(queries), _bits(keys), dim, room[0], out, _bits(weights), _bits(values), room[1], sums
    )  # fmt: skip
    want = queries.double() @ keys.double().T
    np.testing.assert_allclose(out[:rows], want[:rows].float(), rtol=1e-5, atol=1e-4)
    want = before.double() + weights.double() @ values.double()
    np.testing.assert_allclose(sums[:rows], want[:rows].float(), rtol=1e-5, atol=1e-4)


DENYING = """
import ctypes, struct, sys
load, equal, give = 0x20, 0x15, 0x06  # of the number of a system call; skip a line unless it is arch_prctl; an answer
lines = [(load, 0, 0, 0), (equal, 0, 1, 158), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *line) for line in lines)
held = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
if libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
"""


def test_where_the_kernel_denies_the_matrix_unit_the_step_does_without(tmp_path: Path) -> None:
    """By a filter of system calls, as a sandbox has it."""
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=VOCAB, **shape, num_key_value_heads=2, head_dim=32, max_position_embeddings=256)
    directory, ids = rounded_tiny(tmp_path / "model", config), random_ids(70, 5)
    asking = f"""
        import logging, numpy as np
        from pathlib import Path
        from moonpool.core.config import Config, EngineConfig, ModelConfig
        from moonpool.engine.engine import Row, load_engine
        logging.basicConfig()
        model = Path({str(directory)!r})
        config = Config(model=ModelConfig(path=str(model)), engine=EngineConfig(block_tokens=16, backend="compiled"))
        engine = load_engine(config, model, threads=2, pages=12, cache=model / "cache")
        ids, whole, cut = {list(ids)!r}, engine.pages.allocate(5), engine.pages.allocate(5)
        logits = engine.forward([Row(ids, 0, whole, True)]).numpy().copy()
        for begin, end in ((0, 1), (1, 14), (14, 69)):
            engine.forward([Row(ids[begin:end], begin, cut, False)])
        beside = engine.forward([Row(ids[69:], 69, cut, True), Row(ids[69:], 69, whole, True)]).numpy()
        assert np.array_equal(beside[0], logits[0]) and np.array_equal(beside[1], logits[0])
        np.save({str(tmp_path / "logits.npy")!r}, logits)
        engine.close()
    """
    made = [sys.executable, "-c", DENYING + textwrap.dedent(asking)]
    ran = subprocess.run(made, capture_output=True, text=True, timeout=280, check=False)
    if ran.returncode == 77:
        pytest.skip("filters of system calls cannot be set")
    assert ran.returncode == 0, ran.stderr
    assert "the matrix unit (AMX) of this CPU is not used, the kernel denies it: Operation not permitted" in ran.stderr
    logits = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert_nearer_than_the_library(logits, directory, ids, [len(ids) - 1])
