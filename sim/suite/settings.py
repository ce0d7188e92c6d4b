"""Everything that decides a run, as values: they are in the report, and their digest names a finished run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from moonpool.sim.suite.published import LINK, NODE_TOKENS, TBT_LIMIT_S, TTFT_LIMIT_S
from moonpool.sim.suite.workload import Workload

Settings = dict[str, float]  # of a policy or an admission, by name


class _Run(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheRun(_Run):
    """One shared prefix cache, requests in file order."""

    kind: Literal["cache"] = "cache"
    workload: Workload
    eviction: str
    tokens: int


class PredictionRun(_Run):
    """Prefill times foretold by a fit to fig. 14. Without a workload: fig. 14's own bars."""

    kind: Literal["prediction"] = "prediction"
    workload: Workload | None = None


class ClusterRun(_Run):
    """One replay through the simulated cluster."""

    kind: Literal["cluster"] = "cluster"
    workload: Workload
    prefill: int = 8
    decode: int = 8
    policy: str = "moonpool"
    policy_settings: Settings = {}
    admission: str = "none"
    admission_settings: Settings = {}
    speed: float = 1.0
    bursts: Literal["released", "spread"] = "released"
    order: Literal["fifo", "shortest"] = "fifo"  # of a prefill worker's own queue
    age: float = 0.1
    eviction: str = "lru"
    pool_tokens: int = NODE_TOKENS
    ssd_tokens: int = 0
    ssd_read_bytes_per_s: float = 5e9
    link_bytes_per_s: float = LINK
    kv_bytes: float = 1.0  # of what a token's KV has, as it travels and lies in the pool: 0.5 where it is compressed to half
    decode_slope: Literal["served", "single"] = "served"
    prefill_factor: float = 1.0
    span_factor: float = 1.0  # what computing takes longer where several nodes share a prompt
    after_prefill_s: float = 0.0
    ttft_limit_s: float = TTFT_LIMIT_S
    tbt_limit_s: float = TBT_LIMIT_S
    planner: bool = False  # roles are switched while it runs


class SpeedRun(_Run):
    """The highest replay speed, in steps of ``step``, at which a share ``share`` has its first token within ``within_s``."""

    kind: Literal["speed"] = "speed"
    base: ClusterRun
    share: float = 0.9
    within_s: float = 5.0
    least: float
    most: float
    step: float = 0.05


class ForcedRun(_Run):
    """Refused requests let in alone, and what becomes of them and of all that were accepted."""

    kind: Literal["forced"] = "forced"
    base: ClusterRun
    samples: int = 200


Run = Annotated[CacheRun | PredictionRun | ClusterRun | SpeedRun | ForcedRun, Field(discriminator="kind")]
AnyRun = CacheRun | PredictionRun | ClusterRun | SpeedRun | ForcedRun


class Job(BaseModel):
    """One run for one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Run
    traces: Path | None = None


def digest(run: AnyRun, code: str) -> str:
    """Names the outcome of ``run`` by the code of version ``code``."""
    return hashlib.blake2b(f"{code}\n{run.model_dump_json()}".encode(), digest_size=12).hexdigest()
