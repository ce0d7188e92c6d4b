"""Which backend computes a model here: the fastest that the machine and the model allow, or the one asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.core.config import Config
from moonpool.engine.backends import Backend
from moonpool.engine.loading import ModelFacts
from moonpool.engine.module_backend import ModuleBackend
from moonpool.engine.torch_backend import PageTensor


@dataclass(frozen=True, slots=True)
class Chosen:
    backend: Backend
    torch_threads: int  # of the thread that computes


def choose(
    config: Config, model_dir: Path, model: torch.nn.Module, facts: ModelFacts, memory: PageTensor, threads: int
) -> Chosen:
    """A backend over ``memory``; it owns ``model`` from now on."""
    return Chosen(ModuleBackend(model, memory), threads)
