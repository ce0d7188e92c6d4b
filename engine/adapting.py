"""Which backend computes a model with adapters: from its recipe where it has one, else by its own modules."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError, UnsupportedModel
from moonpool.core.layout import KV
from moonpool.engine.adapter_files import load_adapters
from moonpool.engine.choosing import Chosen, cannot_serve
from moonpool.engine.device import device_of
from moonpool.engine.families import known, recipe_of
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.loading import ModelFacts, load_model
from moonpool.engine.low_rank import AdaptedBackend, Adapters
from moonpool.engine.module_backend import ModuleBackend
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.trial import Trial, disagreement

log = logging.getLogger(__name__)
_FIX = "leave model.adapters empty, or merge the adapter into a checkpoint of its own"
_NOTE = "not compiled: model.adapters add to linear layers, it computes fixed ones"


def choose_adapted(
    config: Config, model_dir: Path, model: torch.nn.Module, facts: ModelFacts, memory: PageTensor, threads: int, cache: Path
) -> tuple[Chosen, frozenset[str]]:
    """As ``choosing.choose``, and the digests of the adapters of ``config``. What they add is computed beside the model's own
    weights. Every adapter takes part in the trial.
    """
    if memory.layout.kind != KV:
        raise UnsupportedModel(f"model.adapters: not computed for multi-head latent attention; {_FIX}", param="model.adapters")
    adapters = load_adapters(config.model.adapters, model, cache)
    module = _by_modules(model, memory, adapters)
    if config.engine.backend == "torch" or not known(model):
        return _without_recipe(config, model, Chosen(module, threads, _NOTE)), adapters.digests
    trials = [Trial(memory, facts, name) for name in ("", *sorted(adapters.digests))]
    want = torch.cat([trial.answers(module) for trial in trials])
    recipe = recipe_of(model, facts.max_context, adapters)
    if recipe is None:
        return _without_recipe(config, model, Chosen(module, threads, _NOTE)), adapters.digests
    module.close()
    fused = AdaptedBackend(FusedBackend(recipe, memory), adapters, memory.device)
    got = torch.cat([trial.answers(fused) for trial in trials])
    what = disagreement(got, want, memory)
    if what is None:
        return Chosen(fused, threads, _NOTE), adapters.digests
    fused.close()
    if config.engine.backend == "fused":
        raise cannot_serve("fused", what)
    log.warning("%s: backend fused is not used: %s; backend torch serves", model_dir, what)
    again = load_model(config, model_dir, memory.device)[0]
    adapters = load_adapters(config.model.adapters, again, cache)
    return Chosen(_by_modules(again, memory, adapters), threads, f"fused: {what}"), adapters.digests


def _without_recipe(config: Config, model: torch.nn.Module, plain: Chosen) -> Chosen:
    if config.engine.backend == "fused":
        what = f"{type(model).__name__} is of no family that it knows, or differs from it (docs/engine.md)"
        raise cannot_serve("fused", what)
    return plain


def _by_modules(model: torch.nn.Module, memory: PageTensor, adapters: Adapters) -> AdaptedBackend:
    adapters.hook()
    return AdaptedBackend(ModuleBackend(model, memory), adapters, memory.device)


def require_fit(config: Config) -> None:
    """ConfigError where ``config`` has adapters and something that does not compute them."""
    engine = config.engine
    if not config.model.adapters:
        return
    if engine.backend not in ("auto", "fused", "torch"):
        raise cannot_serve(engine.backend, "model.adapters add to linear layers, which fused and torch compute alone")
    if engine.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel: {engine.tensor_parallel} ranks do not share adapters, and model.adapters names some; "
            f"use 1, or {_FIX}",
            param="engine.tensor_parallel",
        )
    if (device := device_of(config).type) != "cpu":
        raise ConfigError(f"model.adapters: not computed on {device} yet; engine.device cpu, or {_FIX}", param="model.adapters")
