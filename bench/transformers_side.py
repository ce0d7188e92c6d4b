"""The other side of a comparison: plain ``transformers``, asked over pipes between our own measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from moonpool.core.errors import ConfigError


class OtherSide(Protocol):
    def first_token_ms(self, tokens: int, seed: int) -> float:
        """Answering one token to a random prompt of ``tokens`` tokens."""

    def per_token_ms(self, batch: int, prompt: int, new: int, seed: int) -> float:
        """Time per token after the first, over ``new`` of them, of a batch whose rows have ``prompt`` tokens."""


class TransformersSide:
    """Measures when told to and sleeps otherwise. Use on one thread."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child = child
        self._log = log
        self.threads = int(self._answer()["threads"])

    def first_token_ms(self, tokens: int, seed: int) -> float:
        return self._ask({"op": "first_token", "tokens": tokens, "seed": seed})

    def per_token_ms(self, batch: int, prompt: int, new: int, seed: int) -> float:
        return self._ask({"op": "per_token", "batch": batch, "prompt": prompt, "new": new, "seed": seed})

    def _ask(self, command: dict[str, Any]) -> float:
        if self._child.stdin is not None:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
        return float(self._answer()["ms"])

    def _answer(self) -> dict[str, Any]:
        line = self._child.stdout.readline() if self._child.stdout is not None else ""
        if not line:
            tail = self._log.read_text(errors="replace")[-600:]
            raise ConfigError(f"bench: the transformers side ended: {tail}", param="bench")
        value: dict[str, Any] = json.loads(line)
        return value


@contextmanager
def transformers_side(model_dir: Path, threads: int) -> Iterator[TransformersSide]:
    """A child process with ``model_dir`` loaded on ``threads`` threads. ConfigError: it did not come up."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "transformers.log"
        with log.open("w") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "moonpool.bench.transformers_child", str(model_dir), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # as our workers: where sessions share cores by group, both sides get the same share
            )
        try:
            yield TransformersSide(child, log)
        finally:
            child.kill()
            child.communicate()
