"""A second model for tests of several: shaped like the first one, and answering otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def other_weights(model: Path, folder: Path) -> Path:
    """The same configuration and tokenizer, and every weight a little different."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    rng = np.random.default_rng(27)
    tensors = load_file(model / "model.safetensors")
    changed = {name: t + rng.normal(0, 0.05, t.shape).astype(t.dtype) for name, t in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
