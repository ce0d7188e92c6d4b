"""The files of a model directory, and what tells two models apart. Without torch: store nodes read them, too."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.core.parsing import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_READ_BYTES = 8 << 20


def default_cache() -> Path:
    return Path.home() / ".cache/moonpool/models"


def require_model(model_dir: Path) -> None:
    """ConfigError where ``model_dir`` is that of an adapter, which the library would merge or stumble over."""
    if (model_dir / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"model.path: {model_dir} is an adapter ({ADAPTER_CONFIG}), not a model; give its base model as model.path and "
            "this directory in model.adapters",
            param="model.path",
        )


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of the checkpoint; ConfigError naming the first that is missing."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        other = sorted(p.name for p in model_dir.glob("*.bin")) or sorted(p.name for p in model_dir.glob("*.gguf"))
        found = f"only {other[0]}, which is not read" if other else "neither"
        raise ConfigError(
            f"model.path: {model_dir} needs model.safetensors or model.safetensors.index.json and has {found}",
            param="model.path",
        )
    try:
        names = sorted(set(read_json(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"model.path: {index} is not a safetensors index; fetch it again", param="model.path") from e
    files = [model_dir / str(name) for name in names]
    for file in files:
        if file.parent != model_dir or not file.is_file():
            raise ConfigError(f"model.path: {file} is named by {index.name} but missing; fetch it again", param="model.path")
    return files


def model_fingerprint(model_dir: Path, cache: Path) -> str:
    """32 hex digits: BLAKE2b over config.json and the weight files, remembered in ``cache`` by path, size and mtime."""
    return _digest(model_dir, [model_dir / "config.json", *weight_files(model_dir)], cache)


def adapter_digest(name: str, directory: Path, cache: Path) -> str:
    """The same of the adapter ``name`` in ``directory``; ConfigError where that has none."""
    files = [directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ConfigError(
            f"model.adapters: {name!r}: there is no {missing}; give the directory of a PEFT adapter, with {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS}",
            param="model.adapters",
        )
    return _digest(directory, files, cache)


def _digest(directory: Path, files: list[Path], cache: Path) -> str:
    stats = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    place = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=16).hexdigest()
    note = cache / "fingerprints" / f"{place}.json"
    known = _read_note(note)
    if known is not None and known[0] == [list(stat) for stat in stats]:
        return known[1]
    mix = hashlib.blake2b(digest_size=16)
    for file, (name, size, _) in zip(files, stats, strict=True):
        mix.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as f:
            while block := f.read(_READ_BYTES):
                mix.update(block)
    _write_note(note, stats, mix.hexdigest())
    return mix.hexdigest()


def kept_as(fingerprint: str, kv_dtype: str) -> str:
    """The fingerprint of a model whose pages are kept so. What it computes differs, so its blocks have names of their own:
    none of them is ever taken for one of an engine that rounds otherwise."""
    if kv_dtype == "auto":
        return fingerprint
    return hashlib.blake2b(f"{fingerprint} {kv_dtype}".encode(), digest_size=16).hexdigest()


def _read_note(note: Path) -> tuple[list[list[object]], str] | None:
    try:
        raw = read_json(note.read_bytes())
        return list(raw["files"]), str(raw["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_note(note: Path, stats: list[tuple[str, int, int]], fingerprint: str) -> None:
    """Best effort: without it the next start hashes again."""
    fresh = note.with_name(f".{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"files": stats, "fingerprint": fingerprint}))
        fresh.replace(note)
    except OSError:
        fresh.unlink(missing_ok=True)
