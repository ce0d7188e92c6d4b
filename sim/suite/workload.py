"""What a run replays: one of the two public traces, or one of our own making, whole or in part, as it is or shuffled."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from moonpool.core.errors import ConfigError
from moonpool.loadgen.generate import GeneratorConfig, generate_trace
from moonpool.loadgen.trace import TraceRow, read_trace
from moonpool.sim.suite.published import BLOCK_TOKENS
from moonpool.sim.suite.shuffling import shuffle_sessions

TraceName = Literal["conversation", "synthetic", "made"]
MADE = GeneratorConfig(  # an agentic load of long prompts for 16 nodes: what a suite without traces replays
    requests=2_000, seed=7, block_tokens=BLOCK_TOKENS, sessions_per_s=0.9, system_prompts=8, system_tokens=1_500,
    question_tokens=3_000, tool_tokens=2_500, length_sigma=0.8, output_tokens=180, output_least=8, output_most=900, turns=4.0,
    tool_share=0.5, tool_gap_s=8.0, user_gap_s=90.0, answer_s=3.0, token_s=0.04, max_prompt=120_000,
)  # fmt: skip


class Workload(BaseModel):
    """``shuffle``: seed by which session starts are permuted; ``first``: only so many requests of the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: TraceName
    shuffle: int | None = None
    first: int | None = None
    one_token: bool = False  # nothing is decoded: prefill by itself, as in fig. 10

    @property
    def title(self) -> str:
        shuffled = "" if self.shuffle is None else f" shuffled {self.shuffle}"
        return f"{self.trace}{shuffled}" + ("" if self.first is None else f", first {self.first}")


def load(workload: Workload, folder: Path | None) -> list[TraceRow]:
    """ConfigError where a public trace is wanted and ``folder`` has none of that name."""
    rows: list[TraceRow] = list(_read(workload.trace, folder))
    if workload.shuffle is not None:
        rows = shuffle_sessions(rows, BLOCK_TOKENS, workload.shuffle)
    rows = rows[: workload.first]
    return [replace(row, output_length=1) for row in rows] if workload.one_token else rows


@lru_cache(maxsize=2)
def _read(trace: TraceName, folder: Path | None) -> tuple[TraceRow, ...]:
    if trace == "made":
        return tuple(generate_trace(MADE))
    if folder is None:
        raise ConfigError(f"traces: the {trace} trace is wanted; give its folder", param="traces")
    for name in (f"{trace}_trace.jsonl.gz", f"{trace}_trace.jsonl"):
        if (folder / name).is_file():
            return read_trace(folder / name).rows
    raise ConfigError(f"traces: {folder} has no {trace}_trace.jsonl.gz; give the folder of the public traces", param="traces")
