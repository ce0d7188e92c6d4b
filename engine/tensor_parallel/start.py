"""Whether a model can be computed by several ranks here, judged before any of them is started."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.layout import MLA
from moonpool.engine.loading import read_config
from moonpool.engine.support import check_config
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
    if backend not in ("auto", "fused"):
        raise ConfigError(
            f"engine.backend: {backend!r} computes on one rank, engine.tensor_parallel is {count}; use auto or fused",
            param="engine.backend",
        )
    shape = check_config(read_config(model_dir))
    reason = LATENTS if shape.kind == MLA else heads_unfit(shape.heads, shape.kv_heads, count)
    if reason is not None:
        raise cannot_share(reason)
    sums = config.engine.rank_sums
    if sums == "auto":
        sums = "memory" if len(os.sched_getaffinity(0)) >= count else "gloo"
    return Ranks.start(count - 1, sums)


def cannot_share(reason: str) -> ConfigError:
    return ConfigError(
        f"engine.tensor_parallel: this model cannot be shared: {reason}; use another number, or 1",
        param="engine.tensor_parallel",
    )
