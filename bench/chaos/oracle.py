"""Answers that a run is held against: bare engine calls on pages of their own, nothing reused, before any fault.

Runs in a process of its own (``answered``), so that the one that strikes and asks stays free of torch. A continuation in fp32
is the same on every path except at ties: a turn that comes near one is left out, together with those after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.bench.chaos.catalogue import Conversation, Sizes, Turn, conversations
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moonpool.engine.engine import Engine

TIE = 3e-4  # logits moved by so much must not change what is drawn
AT_ONCE = 8  # sequences in one batch
TIME_LIMIT_S = 1_200.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """``ids``: (least, one past the largest) id a client may send."""

    count: int
    ids: tuple[int, int]
    seed: int
    sizes: Sizes

    def conversations(self) -> list[Conversation]:
        return conversations(self.count, self.ids, self.seed, self.sizes)


def answered(wanted: Wanted, config: Config, model_dir: Path) -> list[Conversation]:
    """The conversations with their answers; those without a single one are left out. ConfigError: the model cannot run here."""
    told = {"wanted": asdict(wanted), "config": config.model_dump(mode="json"), "model_dir": str(model_dir)}
    done = subprocess.run(
        [sys.executable, "-m", "moonpool.bench.chaos.oracle"],
        input=json.dumps(told),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    if done.returncode:
        raise ConfigError("chaos: the oracle could not answer; its reason is above", param="model")
    found = wanted.conversations()
    for conversation, answers in zip(found, json.loads(done.stdout), strict=True):
        conversation.answers = [tuple(answer) for answer in answers]
    return [conversation for conversation in found if conversation.answers]


def answer_all(engine: Engine, asked: Sequence[Conversation]) -> None:
    """Fills in ``answers``, turn by turn."""
    turn = 0
    while going := [c for c in asked if len(c.answers) == turn and turn < len(c.turns)]:
        for first in range(0, len(going), AT_ONCE):
            _answer(engine, going[first : first + AT_ONCE], turn)
        turn += 1


def _answer(engine: Engine, batch: Sequence[Conversation], turn: int) -> None:
    from moonpool.core.blocks import blocks_for
    from moonpool.engine.engine import Row

    tokens = [list(c.prompt(turn)) for c in batch]
    sizes = [len(t) for t in tokens]
    tables = [
        engine.pages.allocate(blocks_for(size + c.turns[turn].max_tokens, engine.layout.block_tokens))
        for size, c in zip(sizes, batch, strict=True)
    ]
    done, at_tie, start = set[int](), set[int](), [0] * len(batch)
    try:
        while going := [i for i in range(len(batch)) if i not in done and i not in at_tie]:
            logits = engine.forward([Row(tokens[i][start[i] :], start[i], tables[i], True) for i in going])
            for row, i in enumerate(going):
                token = drawn(logits[row], batch[i].turns[turn], tokens[i][: sizes[i]], tokens[i][sizes[i] :])
                if token is None:
                    at_tie.add(i)
                    continue
                start[i] = len(tokens[i])
                tokens[i].append(token)
                if len(tokens[i]) - sizes[i] == batch[i].turns[turn].max_tokens:
                    done.add(i)
    finally:
        for table in tables:
            engine.pages.release(table)
    for i in done:
        batch[i].answers.append(tuple(tokens[i][sizes[i] :]))


def drawn(logits: torch.Tensor, turn: Turn, prompt: Sequence[int], outputs: Sequence[int]) -> int | None:
    """The id, or None where ``logits`` [vocabulary] moved by ``TIE``, some up and others down, give another one."""
    import torch

    from moonpool.core.request import SamplingParams
    from moonpool.engine.sampler import SamplerState, sample

    if turn.temperature == 0:
        best = logits.topk(2)
        return int(best.indices[0]) if float(best.values[0] - best.values[1]) > 2 * TIE else None
    params = SamplingParams(turn.max_tokens, temperature=turn.temperature, seed=turn.seed, ignore_eos=True)
    signs = torch.randint(0, 2, logits.shape, generator=torch.Generator().manual_seed(len(outputs)))
    move = TIE * (2.0 * signs - 1.0)
    rows = torch.stack([logits, logits + move, logits - move])
    found = {s.token for s in sample(rows, [SamplerState(params, prompt, outputs)] * 3, frozenset())}
    return found.pop() if len(found) == 1 else None


def main() -> int:
    from moonpool.engine.engine import load_engine

    told: dict[str, Any] = json.loads(sys.stdin.read())
    raw = told["wanted"]
    wanted = Wanted(raw["count"], tuple(raw["ids"]), raw["seed"], Sizes(**{k: _pair(v) for k, v in raw["sizes"].items()}))
    config = Config.model_validate(told["config"])
    pages = AT_ONCE * (wanted.sizes.context // config.engine.block_tokens + 1)
    engine = load_engine(config, Path(told["model_dir"]), threads=config.engine.threads or 1, pages=pages)
    asked = wanted.conversations()
    answer_all(engine, asked)
    json.dump([c.answers for c in asked], sys.stdout)
    return 0


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
