"""The shape of K/V read from config.json alone: what the library would say, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.errors import UnsupportedModel
from moonpool.engine.loading import read_config
from moonpool.engine.shape import Shape, shape_in_file
from moonpool.engine.support import check_config

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
OTHERS = ("gpt2", "phi3", "deepseek_v3", "gemma3", "mamba", "no such")
NUMBERS = {
    "hidden_size": [64, 96],
    "num_hidden_layers": [2, 3, None],
    "num_attention_heads": [4, 8, None],
    "num_key_value_heads": [2, 4, None],
    "head_dim": [16, 32, None],
}


def by_library(directory: Path) -> Shape | None:
    try:
        return check_config(read_config(directory))
    except UnsupportedModel:
        return None


def written(directory: Path, kind: str, values: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **values}))
    return directory


@settings(max_examples=120)
@given(st.sampled_from(KINDS), st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in NUMBERS.items()}))
def test_it_is_the_librarys_or_none(kind: str, values: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        directory = written(Path(folder), kind, values)
        found = shape_in_file(directory)
        assert found is None or found == by_library(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_says_it_all_is_enough(kind: str, tmp_path: Path) -> None:
    written(tmp_path, kind, {name: values[0] for name, values in NUMBERS.items()})
    assert shape_in_file(tmp_path) == Shape(2, 4, 2, 16) == by_library(tmp_path)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_are_left_to_the_library(kind: str, tmp_path: Path) -> None:
    written(tmp_path, kind, {name: values[0] for name, values in NUMBERS.items()})
    assert shape_in_file(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "null", '{"model_type": ["llama"]}', '{"model_type": "llama"}'])
def test_a_file_that_is_none_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    assert shape_in_file(tmp_path) is None
    (tmp_path / "config.json").write_text(text)
    assert shape_in_file(tmp_path) is None


def test_a_layout_needs_no_torch(tmp_path: Path) -> None:
    written(tmp_path, "llama", {name: values[0] for name, values in NUMBERS.items()})
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    code = (
        "import pathlib, sys\n"
        "from moonpool.cluster.models import kv_layout\n"
        "from moonpool.core.config import Config\n"
        "import moonpool.kvstore.node\n"
        "assert kv_layout(Config(), pathlib.Path(sys.argv[1])).head_dim == 16\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={"HOME": str(tmp_path)}, timeout=60)
