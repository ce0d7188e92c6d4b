"""Which backend computes a model here: the fastest that the machine and the model allow, or the one asked for.

A backend that is not the module itself has to prove itself before it serves: it computes a short batch that the module has
computed before it. If the two disagree, the module serves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import MLA
from moonpool.engine.backends import Backend
from moonpool.engine.device import described
from moonpool.engine.families import known, recipe_of
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.host_view import HostView
from moonpool.engine.loading import ModelFacts, load_model
from moonpool.engine.module_backend import ModuleBackend
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.recipe import Recipe
from moonpool.engine.tensor_parallel.backend import ParallelBackend
from moonpool.engine.tensor_parallel.ranks import Ranks
from moonpool.engine.tensor_parallel.sharding import unfit as unfit_for_ranks
from moonpool.engine.tensor_parallel.start import cannot_share
from moonpool.engine.trial import Trial, disagreement, plain_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    backend: Backend
    torch_threads: int  # of the thread that computes
    note: str = ""  # why it is not a faster one
    view: HostView | None = None  # what hosts see of pages that the backend keeps; None: it keeps none but those it was given
    where: str = ""  # it computes; empty: where those pages are


def choose(
    config: Config,
    model_dir: Path,
    model: torch.nn.Module,
    facts: ModelFacts,
    memory: PageTensor,
    threads: int,
    own_threads: int,
    ranks: Ranks | None = None,
) -> Chosen:
    """A backend over ``memory``, which is zero afterwards. It owns ``model``, whose weights may have moved into it, and
    ``ranks``, which compute with this process; None: it computes alone. With ranks both are the host's.

    ConfigError where the one that the configuration names cannot serve this model on this machine.
    """
    asked = config.engine.backend
    if ranks is None and (asked == "triton" or (asked == "auto" and memory.device.type == "cuda")):
        return _triton(config, model_dir, model, facts, memory, threads)
    plain = Chosen(ModuleBackend(model, memory), threads)
    if asked == "torch":
        return plain
    if not known(model):
        return _without_recipe(config, model, plain, memory.layout.kind)
    trial = Trial(memory, facts)
    want = trial.answers(plain.backend)
    recipe = recipe_of(model, facts.max_context)
    if recipe is None:
        return _without_recipe(config, model, plain, memory.layout.kind)
    plain.backend.close()
    if ranks is None:
        chosen = _fastest(config, recipe, memory, threads, own_threads)
    else:
        chosen = _on_ranks(recipe, memory, threads, ranks)
        if ranks.keeping.kind == "cuda":
            from moonpool.engine.triton.making import measure

            measure(chosen.backend, memory, facts, chunk=config.engine.prefill_chunk, answers=config.engine.max_batch)
    what = disagreement(trial.answers(chosen.backend), want, memory, None if ranks is None else ranks.keeping.kept)
    if what is None:
        return chosen
    name = chosen.backend.name
    chosen.backend.close()
    if asked != "auto" or ranks is not None:
        raise cannot_serve(name, what)
    log.warning("%s: backend %s is not used: %s; backend torch serves", model_dir, name, what)
    return Chosen(ModuleBackend(load_model(config, model_dir, memory.device)[0], memory), threads, f"{name}: {what}")


def _fastest(config: Config, recipe: Recipe, memory: PageTensor, threads: int, own_threads: int) -> Chosen:
    asked, note = config.engine.backend, ""
    if asked != "fused":
        compiled = _compiled(config, recipe, memory, own_threads)
        if isinstance(compiled, Chosen):
            return compiled
        if asked == "compiled":
            raise cannot_serve(asked, compiled)
        note = f"not compiled: {compiled}"
    return Chosen(FusedBackend(recipe, memory), threads, note)


def _triton(
    config: Config, model_dir: Path, model: torch.nn.Module, facts: ModelFacts, memory: PageTensor, threads: int
) -> Chosen:
    _require_triton(memory.device)
    reference = plain_memory(memory)
    want = Trial(reference, facts).answers(ModuleBackend(model, reference))
    from moonpool.engine.triton.making import triton_backend

    backend = triton_backend(config.engine, model, facts, memory)
    what = disagreement(Trial(memory, facts).answers(backend), want, memory)
    if what is None:
        return Chosen(backend, threads)
    backend.close()
    if config.engine.backend != "auto" or memory.kept != "auto":
        raise cannot_serve("triton", what)
    log.warning("%s: backend triton is not used: %s; backend torch serves", model_dir, what)
    return Chosen(ModuleBackend(load_model(config, model_dir, memory.device)[0], memory), threads, f"triton: {what}")


def _require_triton(device: torch.device) -> None:
    try:  # said so late, because its modules take a second to load, and the package is for Linux only
        from moonpool.engine.triton.backend import unusable
    except ImportError as e:
        raise cannot_serve("triton", f"it does not load here ({e}); PyTorch's CUDA build brings the package triton") from e
    reason = unusable(device)
    if reason is not None:
        raise cannot_serve("triton", reason)


def _on_ranks(recipe: Recipe, memory: PageTensor, threads: int, ranks: Ranks) -> Chosen:
    reason = unfit_for_ranks(recipe, ranks.count + 1)
    if reason is not None:
        raise cannot_share(reason)
    keeping, size = ranks.keeping, ranks.count + 1
    if keeping.attention == "triton":
        _require_triton(keeping.device_of(0))
    note = f"tensor parallel on {size} ranks" + ("" if keeping.kind == "cuda" else "; not compiled: it computes on one")
    backend = ParallelBackend(recipe, memory, ranks, threads)
    where = keeping.described(described(keeping.device_of(0), keeping.kept), size)
    return Chosen(backend, threads, note, backend.view, where)


def _compiled(config: Config, recipe: Recipe, memory: PageTensor, threads: int) -> Chosen | str:
    """Or why not."""
    if recipe.dtype is not torch.bfloat16:  # said here too, because its module and compiler take a second to load
        return f"model.dtype is {memory.layout.dtype}, it computes bfloat16"
    try:
        from moonpool.engine.compiled.backend import CompiledBackend
        from moonpool.engine.compiled.features import unfit
    except ImportError as e:
        return f"it does not load here ({e})"
    reason = unfit(recipe, memory.layout)
    if reason is not None:
        return reason
    usual = config.engine.prefill_chunk + config.engine.max_batch
    return Chosen(CompiledBackend(recipe, memory.layout, memory.tensor, threads=threads, step_tokens=usual), 1)


def _without_recipe(config: Config, model: torch.nn.Module, plain: Chosen, kind: str) -> Chosen:
    if kind == MLA:
        what = f"{type(model).__name__} keeps latents (multi-head latent attention), which compiled and fused do not compute"
    else:
        what = f"{type(model).__name__} is of no family that compiled and fused know, or differs from it (docs/engine.md)"
    if config.engine.tensor_parallel > 1:
        raise cannot_share(what)
    if config.engine.backend != "auto":
        raise cannot_serve(config.engine.backend, what)
    return Chosen(plain.backend, plain.torch_threads, f"neither compiled nor fused: {what}")


def cannot_serve(asked: str, what: str) -> ConfigError:
    return ConfigError(
        f"engine.backend: {asked!r} cannot serve this model here: {what}; use auto, which takes the fastest that can",
        param="engine.backend",
    )
