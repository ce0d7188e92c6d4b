"""Whether a model can be computed by several ranks here, judged before any of them is started."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import MLA
from moonpool.engine.device import device_of
from moonpool.engine.loading import read_config
from moonpool.engine.support import check_config
from moonpool.engine.tensor_parallel.keeping import Keeping
from moonpool.engine.tensor_parallel.line import Sums
from moonpool.engine.tensor_parallel.ranks import Ranks
from moonpool.engine.tensor_parallel.sharding import heads_unfit

LATENTS = "it keeps latents (multi-head latent attention), which all heads share"


def ranks_for(config: Config, model_dir: Path) -> Ranks | None:
    """The ranks beside this process, which load while it loads; None: it computes alone. Whoever gets them closes them.

    ConfigError where configuration or model allow no such number.
    """
    count, backend = config.engine.tensor_parallel, config.engine.backend
    if count == 1:
        return None
    if backend not in ("auto", "fused", "triton"):
        raise ConfigError(
            f"engine.backend: {backend!r} computes on one rank, engine.tensor_parallel is {count}; use auto, fused, or triton",
            param="engine.backend",
        )
    shape = check_config(read_config(model_dir))
    reason = LATENTS if shape.kind == MLA else heads_unfit(shape.heads, shape.kv_heads, count)
    if reason is not None:
        raise cannot_share(reason)
    keeping = _keeping(config)
    return Ranks.start(count - 1, _sums(config, keeping), keeping, config.timing.request_budget_ms / 1e3)


def _keeping(config: Config) -> Keeping:
    on_gpus, kept = device_of(config).type == "cuda", config.engine.kv_dtype
    return Keeping(
        kind="cuda" if on_gpus else "cpu",
        kept=kept,
        attention="triton" if on_gpus or config.engine.backend == "triton" else "torch",
        apart=on_gpus or kept != "auto",
    )


def _sums(config: Config, keeping: Keeping) -> Sums:
    asked, on_gpus = config.engine.rank_sums, keeping.kind == "cuda"
    if asked == "auto":
        if on_gpus:
            return "nccl"
        return "memory" if len(os.sched_getaffinity(0)) >= config.engine.tensor_parallel else "gloo"
    if (asked == "nccl") != on_gpus:
        where = "on GPUs" if on_gpus else "on the CPU"
        raise ConfigError(
            f"engine.rank_sums: {asked!r} is not for ranks that compute {where}, as they do here; use auto",
            param="engine.rank_sums",
        )
    return asked


def cannot_share(reason: str) -> ConfigError:
    return ConfigError(
        f"engine.tensor_parallel: this model cannot be shared: {reason}; use another number, or 1",
        param="engine.tensor_parallel",
    )
