"""A checkpoint against what the model is built of: all of it there, in its shape, and nothing left out that counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from moonpool.engine.refusals import refuse

log = logging.getLogger(__name__)


def check_weights(model: torch.nn.Module, report: Mapping[str, Iterable[Any]], model_dir: Path) -> None:
    """``report``: what the library says of its loading. UnsupportedModel names a tensor; those that belong to nothing that is
    computed are logged."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise refuse(f"{model_dir} lacks the tensor {missing[0]!r} ({len(missing)} missing)", "fetch the whole checkpoint")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, has, want = mismatched[0]
        raise refuse(
            f"{model_dir}: tensor {name!r} has shape {tuple(has)}, another shape than config.json says ({tuple(want)})"
        )
    unused = sorted(report["unexpected_keys"])
    for name in unused:
        if _is_part(model, name):
            raise refuse(
                f"{model_dir}: tensor {name!r} is of a layer that is computed without it, as config.json says (a bias that it "
                "switches off, or scales of quantised weights)",
                "fetch config.json again, or use an unquantised version",
            )
    if unused:
        log.warning("%s: %d tensors are not used: %s", model_dir, len(unused), ", ".join(unused[:20]))


def _is_part(model: torch.nn.Module, tensor: str) -> bool:
    """Whether what ``tensor`` is stored with has weights of its own: then it was meant to be computed with them. Buffers that
    older checkpoints carry (masks, frequencies) belong to modules that have none."""
    try:
        module = model.get_submodule(tensor.rpartition(".")[0])
    except AttributeError:
        return False
    return module is not model and next(module.parameters(recurse=False), None) is not None
