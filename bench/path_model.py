"""What ``bench.path`` serves: a model whose steps cost about nothing, with the tokenizer and vocabulary of a real one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from moonpool.bench.tiny_model import make_tiny_model
from moonpool.core.config import Config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
CONTEXT = 8_192
_PROMPT = 128  # tokens of context that the bare loop begins with


def make_path_model(folder: Path, real: Path) -> Path:
    """A tiny model in ``folder`` that takes and gives the ids of the model in ``real``."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(real / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    make_tiny_model(folder, ids, CONTEXT)
    for name in _TOKENIZER_FILES:
        if (real / name).is_file():
            shutil.copyfile(real / name, folder / name)
    return folder


class BareEngine:
    """The same engine as a worker's, with nothing around it: what is left of a step when the path costs nothing."""

    def __init__(self, config: Config, model_dir: Path, threads: int) -> None:
        from moonpool.engine.engine import load_engine

        self._engine = load_engine(config, model_dir, threads=threads)

    def steps_s(self, batch: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps of ``batch`` sequences, greedy draws included."""
        rows = [_Sequence(self._engine.pages.allocate(self._pages_for(steps))) for _ in range(batch)]
        try:
            return [self._step_s(rows) for _ in range(steps)]
        finally:
            for row in rows:
                self._engine.pages.release(row.pages)

    def warm_ms(self, tokens: int, rounds: int) -> list[float]:
        """Milliseconds of computing the last token of a prompt of ``tokens`` and of drawing the first id."""
        row = _Sequence(self._engine.pages.allocate(-(-tokens // self._engine.layout.block_tokens)), tokens)
        try:
            return [self._step_s([row], advance=False) * 1e3 for _ in range(rounds)]
        finally:
            self._engine.pages.release(row.pages)

    def close(self) -> None:
        self._engine.close()

    def _pages_for(self, steps: int) -> int:
        return -(-(_PROMPT + steps) // self._engine.layout.block_tokens)

    def _step_s(self, sequences: Sequence[_Sequence], *, advance: bool = True) -> float:
        from moonpool.core.request import SamplingParams
        from moonpool.engine.engine import Row
        from moonpool.engine.sampler import SamplerState, sample

        begun = time.perf_counter()
        rows = [Row([one.token], one.length - 1, one.pages, wants_logits=True) for one in sequences]
        logits = self._engine.forward(rows)
        states = [SamplerState(SamplingParams(1, temperature=0.0), (), ()) for _ in sequences]
        drawn = sample(logits, states, self._engine.eos_ids)
        took = time.perf_counter() - begun
        if advance:
            for one, sampled in zip(sequences, drawn, strict=True):
                one.token, one.length = sampled.token, one.length + 1
        return took


class _Sequence:
    """Its pages hold what they hold: what is computed from them does not matter here."""

    def __init__(self, pages: list[int], length: int = _PROMPT) -> None:
        self.pages, self.length, self.token = pages, length, 1_000
