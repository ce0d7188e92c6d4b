"""A model directory becomes a module that computes: files checked, memory counted, weights loaded, the model probed."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import ITEM_BYTES, MLA, KVLayout
from moonpool.core.parsing import read_json
from moonpool.core.sizes import sized
from moonpool.engine import attention
from moonpool.engine.checkpoint import ADAPTER_WEIGHTS, require_model, weight_files
from moonpool.engine.device import available, device_of, page_bytes
from moonpool.engine.latent_attention import page_latents
from moonpool.engine.loaded_weights import check_weights
from moonpool.engine.page_tensor import CPU
from moonpool.engine.quantised import Kept
from moonpool.engine.refusals import MEND, refuse, refusing
from moonpool.engine.shape import Shape
from moonpool.engine.support import Probe, check_calls, check_config, check_rope

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CGROUP = Path("/sys/fs/cgroup")
# As they are, and merged for projections that are one (``Adapters.merged``): B of q, k and v with zeros for the others.
ADAPTER_COPIES = 3
_RANK_BYTES = 256 << 20  # an interpreter with PyTorch
_MAX_HEADER = 100 << 20  # safetensors' own bound
# What the library divides by before anybody could ask it for its value.
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "decoder_sparse_step", "max_position_embeddings")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    shape: Shape
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes a worker is about to take, before it takes them."""

    weights: int  # of adapters, too
    pages: int  # how many
    page_bytes: int  # of one, on the device
    available: int  # on the device
    view_bytes: int = 0  # of one in the host's view; 0: the pages are that themselves
    host_available: int | None = None  # None: the device is the host
    ranks_bytes: int = 0  # of the processes of further ranks, beside their weights; on the host

    @property
    def needed(self) -> int:
        """On the device."""
        on_host = self.view_bytes if self.host_available is None else 0
        return self.weights + self.pages * (self.page_bytes + on_host) + self.ranks_bytes

    def require(self) -> None:
        """ConfigError with the numbers unless everything fits."""
        if self.pages < 1:
            raise ConfigError(
                f"engine.page_bytes: not one page of {sized(self.page_bytes)} fits; raise it, or set engine.pages",
                param="engine.page_bytes",
            )
        if self.needed > self.available:
            ranks = f", {sized(self.ranks_bytes)} of further ranks" if self.ranks_bytes else ""
            raise ConfigError(
                f"engine.pages: {self.pages} pages of {sized(self.page_bytes)}{ranks} and {sized(self.weights)} of weights "
                f"need {sized(self.needed)}, {sized(self.available)} of memory are available; lower engine.pages or "
                "engine.page_bytes, or use a smaller model",
                param="engine.pages",
            )
        if self.host_available is not None and self.pages * self.view_bytes > self.host_available:
            raise ConfigError(
                f"engine.pages: the host's view of {self.pages} pages takes {sized(self.pages * self.view_bytes)} of pinned "
                f"memory, {sized(self.host_available)} are available on this host; lower engine.pages or engine.page_bytes",
                param="engine.pages",
            )

    def __str__(self) -> str:
        view = "" if self.host_available is None else f"; {sized(self.pages * self.view_bytes)} pinned on the host"
        ranks = f"further ranks {sized(self.ranks_bytes)}, " if self.ranks_bytes else ""
        return (
            f"weights {sized(self.weights)}, {ranks}{self.pages} pages of {sized(self.page_bytes)}, "
            f"together {sized(self.needed)} of {sized(self.available)} available{view}"
        )


def memory_budget(config: Config, model_dir: Path, *, pages: int | None = None) -> MemoryBudget:
    """What loading ``model_dir`` would take. Reads headers only; ConfigError or UnsupportedModel where it cannot work."""
    model_config = read_config(model_dir)
    shape = check_config(model_config)
    item = ITEM_BYTES[config.model.dtype]
    layout = shape.layout("", config.model.dtype, config.engine.block_tokens)
    device, page = device_of(config), page_bytes(layout, config.engine.kv_dtype)
    count = pages if pages is not None else config.engine.pages or config.engine.page_bytes // page
    weights = item * (sum(_elements(file) for file in weight_files(model_dir)) + ADAPTER_COPIES * _of_adapters(config))
    ranks = (config.engine.tensor_parallel - 1) * _RANK_BYTES
    if device.type == "cuda" and ranks:
        return _budget_of_each(config.engine.tensor_parallel, layout, config.engine.kv_dtype, weights, count, ranks)
    if device.type == "cuda":
        return MemoryBudget(weights, count, page, available(device), layout.block_bytes, _available())
    view = 0 if config.engine.kv_dtype == "auto" else layout.block_bytes
    return MemoryBudget(weights, count, page, _available(), view, ranks_bytes=ranks)


def _of_adapters(config: Config) -> int:
    """Numbers in the adapters that are named. One that cannot be read counts for none: what reads it in full refuses it."""
    found = 0
    for directory in config.model.adapters.values():
        try:
            found += _elements(Path(directory).expanduser() / ADAPTER_WEIGHTS)
        except ConfigError:
            pass
    return found


def _budget_of_each(ranks: int, layout: KVLayout, kept: Kept, weights: int, pages: int, processes: int) -> MemoryBudget:
    """Of the fullest of ``ranks`` GPUs, each with its share; all weights go through the host, beside ``processes``' bytes."""
    page = page_bytes(replace(layout, kv_heads=-(-layout.kv_heads // ranks)), kept)
    least = min(available(torch.device("cuda", rank)) for rank in range(ranks))
    return MemoryBudget(
        -(-weights // ranks), pages, page, least, layout.block_bytes, max(0, _available() - weights - processes)
    )


def _available() -> int:
    """Bytes this process may still take: the machine's, or its control group's where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def read_config(model_dir: Path) -> PreTrainedConfig:
    require_model(model_dir)
    file = model_dir / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: {model_dir} has no config.json; give a Hugging Face model directory", param="model.path"
        )
    raw = _fields(file)
    for name in _COUNTS:
        value = raw.get(name)
        if type(value) is int and value < 1:
            raise refuse(f"config.json: {name} is {value}, a positive number is needed", MEND)
    with refusing(f"{file} is not a configuration the library knows (model_type {raw.get('model_type')!r})"):
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


def _fields(file: Path) -> dict[str, object]:
    """Empty where ``file`` is no JSON object: the library says so."""
    try:
        raw = read_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def context_of(config: Config, model_config: PreTrainedConfig) -> int:
    """The longest sequence to be served, prompt and output together."""
    longest = getattr(model_config, "max_position_embeddings", None)
    asked = config.model.max_context
    if not isinstance(longest, int):
        if not asked:
            raise ConfigError(
                "model.max_context: the model does not say its longest context; set it", param="model.max_context"
            )
        return asked
    if asked > longest:
        raise ConfigError(
            f"model.max_context: {asked} is more than the {longest} tokens of the model; use {longest} or less",
            param="model.max_context",
        )
    return asked or longest


def _elements(file: Path) -> int:
    """Numbers stored in a safetensors file, from its header."""
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 2 <= size <= min(_MAX_HEADER, os.fstat(f.fileno()).st_size - 8):
                raise ValueError("its header length is out of range")
            header = read_json(f.read(size))
            header.pop("__metadata__", None)
            held = os.fstat(f.fileno()).st_size - 8 - size
        if max((entry["data_offsets"][1] for entry in header.values()), default=0) != held:
            raise ValueError(f"it holds {held} bytes of tensors, its header speaks of more or less")
        return sum(math.prod(entry["shape"]) for entry in header.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"model.path: {file} is not a readable safetensors file ({e}); fetch it again", param="model.path"
        ) from e


def load_model(config: Config, model_dir: Path, device: torch.device = CPU) -> tuple[torch.nn.Module, ModelFacts]:
    """The model with our attention function in every layer, probed, on ``device``. Weights and activations in
    ``config.model.dtype``."""
    model_config = read_config(model_dir)
    shape = check_config(model_config)
    max_context = context_of(config, model_config)
    check_rope(model_config, max_context)
    weight_files(model_dir)
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {model_dir} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); add it", param="model.path"
        )
    transformers.logging.disable_progress_bar()  # the library's, of this process; a worker's log is no terminal
    with refusing(f"{model_dir} does not load as {model_config.model_type!r}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=model_config,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=attention.NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with the tensor's name
        )
    check_weights(model, report, model_dir)
    model.eval()
    if shape.kind == MLA:
        page_latents(model)
    model.to(device)
    with device:  # what is made without saying where
        _probe(model, model_config, shape)
    vocab = int(model.get_output_embeddings().weight.shape[0])
    return model, ModelFacts(shape, vocab, max_context, _eos_ids(model))


@torch.inference_mode()
def _probe(model: torch.nn.Module, model_config: PreTrainedConfig, shape: Shape) -> None:
    kind = model_config.model_type
    for name in ("position_ids", "logits_to_keep"):
        if name not in inspect.signature(model.forward).parameters:
            raise refuse(f"{kind!r} has no argument {name}, which flattened batches need")
    probe = Probe()
    with refusing(f"{kind!r} does not compute a flattened batch"):
        logits: torch.Tensor = model(
            input_ids=torch.zeros((1, 2), dtype=torch.int64),
            position_ids=torch.arange(2)[None],
            use_cache=False,
            logits_to_keep=torch.tensor([1]),
            moonpool_step=probe,
        ).logits
    check_calls(probe, model_config, shape)
    if not all(bool(numbers.isfinite().all()) for numbers in (logits, *probe.made())):
        raise refuse(
            f"{kind!r} computes what is no number, from zero, infinity or NaN in its weights or in config.json",
            "fetch the model again",
        )


def _eos_ids(model: torch.nn.Module) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json and config.json together."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(found)
