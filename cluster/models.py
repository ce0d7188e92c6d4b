"""The model directory of this cluster, fetched once before any process starts, and its KV layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import KVLayout

if TYPE_CHECKING:
    from moonpool.engine.shape import Shape

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray gives to the entry of a job


def local_model(path: str, progress: Callable[[str], None]) -> Path:
    """The directory that ``model.path`` names; fetched into the user's cache where needed. ConfigError where it cannot be.

    Fetching runs in a child process: it needs torch, which a supervisor does not carry.
    """
    for found in (Path(path).expanduser(), Path.home() / ".cache/moonpool/models" / path):
        if (found / "config.json").is_file():
            return found.absolute()
    progress(f"model {path}: looking for it")
    fetch = (sys.executable, "-m", "moonpool.cli.main", "model", "fetch", path)
    with subprocess.Popen(fetch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_outside_of_job()) as child:
        said = ""
        for line in child.stderr or ():
            if said:
                progress(said)
            said = line.rstrip()  # the last line is held back: it is the error, where there is one
        directory = child.stdout.read().strip() if child.stdout else ""
    if child.returncode:
        raise ConfigError(said.removeprefix("moonpool: "), param="model.path")
    progress(said)
    return Path(directory)


def with_models_fetched(config: Config, progress: Callable[[str], None]) -> Config:
    """``config`` once the models of ``gateway.models`` are here: their names and the paths of those that are folders spelled
    out, and those of adapters, so that processes elsewhere mean the same ones. ConfigError where one cannot be had.
    """
    found = []
    for model in config.gateway.models:
        directory = local_model(model.path, progress)
        is_folder = Path(model.path).expanduser().absolute() == directory
        named = {"name": model.served_name, "path": str(directory) if is_folder else model.path}
        found.append(model.model_copy(update={**named, "adapters": _spelled_out(model.adapters)}))
    own = config.model.model_copy(update={"adapters": _spelled_out(config.model.adapters)})
    return config.model_copy(update={"model": own, "gateway": config.gateway.model_copy(update={"models": tuple(found)})})


def _spelled_out(places: Mapping[str, str]) -> dict[str, str]:
    return {name: str(Path(place).expanduser().absolute()) for name, place in places.items()}


def kv_layout(config: Config, model_dir: Path) -> KVLayout:
    """What every engine that loads ``model_dir`` will have, without loading it."""
    from moonpool.engine.checkpoint import default_cache, kept_as, model_fingerprint
    from moonpool.engine.shape import shape_in_file

    shape = shape_in_file(model_dir) or _shape_by_library(model_dir)
    fingerprint = kept_as(model_fingerprint(model_dir, default_cache()), config.engine.kv_dtype)
    return shape.layout(fingerprint, config.model.dtype, config.engine.block_tokens)


def _shape_by_library(model_dir: Path) -> Shape:
    from moonpool.engine.loading import read_config
    from moonpool.engine.support import check_config

    return check_config(read_config(model_dir))


def _outside_of_job() -> dict[str, str]:
    """The environment of a command that is not the entry of the Ray job that this process may be."""
    return {name: value for name, value in os.environ.items() if name != JOB_CONFIG}
