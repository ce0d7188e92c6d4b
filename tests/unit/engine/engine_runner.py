"""Drives an engine the way workers do, and builds the tiny random models that the tests of this folder share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from moonpool.core.blocks import BlockHasher, blocks_for
from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.request import SamplingParams
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.sampler import SamplerState, sample
from moonpool.engine.trial import difference

TIE = 1e-4  # two best logits closer than this may swap
VOCAB = 128
_TEXT = (
    "The harbour master kept a book in which every ship had a line of its own: the day it came, what it carried, and who "
    "had signed for it. On the last page there was a drawing of the bay as it had looked a hundred years before, with the "
    "sand bank where the lighthouse now stands, and beneath it somebody had written that a tide is a promise. "
)


@dataclass
class Transcript:
    """Greedy output ids; the logits each came from; prompt tokens that were not computed."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    cached: int = 0

    def gap(self, i: int) -> float:
        best = self.logits[i].topk(2).values
        return float(best[0] - best[1])


@dataclass
class _Sequence:
    prompt: Sequence[int]
    forced: Sequence[int]
    table: list[int]
    keys: list[bytes]
    done: int
    seen: Transcript

    def ids(self) -> list[int]:
        return [*self.prompt, *self.seen.tokens]


class Runner:
    """All prompts advance together, one forward pass a step, so chunks and decode steps of different sequences mix."""

    def __init__(self, engine: Engine, *, reuse: bool = False, adapter: str = "") -> None:
        self.engine = engine
        self.adapter = adapter
        self.reuse = reuse
        self.hasher = BlockHasher(bytes(32), bytes(16), engine.layout.block_tokens)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: int,
        *,
        chunk: Callable[[int], int] = lambda start: 1 << 30,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> list[Transcript]:
        """``chunk(start)`` tokens of a prompt at a time. ``forced`` ids are fed instead of the sampled ones."""
        running = [self._begin(p, outputs, forced[i] if forced else ()) for i, p in enumerate(prompts)]
        while live := [s for s in running if len(s.seen.tokens) < outputs]:
            rows, ends = [], []
            for s in live:
                ids = s.ids()
                end = min(s.done + chunk(s.done), len(ids)) if s.done < len(s.prompt) else len(ids)
                rows.append(Row(ids[s.done : end], s.done, s.table, end == len(ids), adapter=self.adapter))
                ends.append((s, end))
            logits = iter(self.engine.forward(rows))
            for (s, end), row in zip(ends, rows, strict=True):
                s.done = end
                self._publish(s)
                if row.wants_logits:
                    self._emit(s, next(logits))
        for s in running:
            self.engine.pages.release(s.table)
        return [s.seen for s in running]

    def _begin(self, prompt: Sequence[int], outputs: int, forced: Sequence[int]) -> _Sequence:
        engine, size = self.engine, self.engine.layout.block_tokens
        keys = self.hasher.keys(prompt)
        table = engine.pages.match(keys) if self.reuse else []
        done = len(table) * size
        if done == len(prompt):  # nothing left to compute: one token anew, on a private copy of the last block
            private = engine.pages.allocate(1)
            engine.copy_page(table[-1], private[0])
            engine.pages.release(table[-1:])
            table, done = table[:-1] + private, done - 1
        table += engine.pages.allocate(blocks_for(len(prompt) + outputs, size) - len(table))
        return _Sequence(prompt, forced, table, keys, done, Transcript(cached=done))

    def _publish(self, s: _Sequence) -> None:
        if self.reuse:
            for i, key in enumerate(s.keys[: s.done // self.engine.layout.block_tokens]):
                self.engine.pages.publish(s.table[i], key, s.keys[i - 1] if i else None)

    def _emit(self, s: _Sequence, logits: torch.Tensor) -> None:
        position = len(s.seen.tokens)
        state = SamplerState(SamplingParams(max_tokens=1 << 20, temperature=0), s.prompt, s.seen.tokens)
        drawn = sample(logits[None], [state], self.engine.eos_ids)[0].token
        s.seen.logits.append(logits.clone())  # the engine may write its next answer there
        s.seen.tokens.append(s.forced[position] if s.forced else drawn)


def hand_over(source: Engine, pages: Sequence[int], target: Engine, tokens: int) -> list[int]:
    """Fresh pages of ``target`` with the bytes of ``tokens`` tokens of ``pages``; of a last block its valid tokens alone."""
    layout, fresh = source.layout, target.pages.allocate(len(pages))
    for i, (page, to) in enumerate(zip(pages, fresh, strict=True)):
        valid = min(tokens - i * layout.block_tokens, layout.block_tokens)
        rows = (layout.layers, layout.planes, layout.block_tokens, -1)
        target.kv_bytes[to].reshape(rows)[:, :, :valid] = source.kv_bytes[page].reshape(rows)[:, :, :valid]
    return fresh


def assert_same(got: Transcript, want: Sequence[int], what: str) -> bool:
    """Equal ids, or a first difference at a tie, which is printed; returns whether there was one."""
    for i, (a, b) in enumerate(zip(got.tokens, want, strict=True)):
        if a != b:
            print(f"{what}: output {i} is {a}, not {b}; its two best logits are {got.gap(i):.1e} apart")
            assert got.gap(i) < TIE, what
            return True
    return False


def save_tiny(directory: Path, config: PreTrainedConfig, *, seed: int = 0, shard: str = "5GB") -> Path:
    """A random model large enough in its weights that attention decides the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
    model.save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return directory


def load_tiny(
    directory: Path,
    *,
    block: int = 16,
    pages: int = 48,
    dtype: str = "float32",
    poison: bool = False,
    context: int = 0,
    backend: str = "auto",
    tensor_parallel: int = 1,
    rank_sums: str = "auto",
) -> Engine:
    config = Config(
        model=ModelConfig(path=str(directory), dtype=dtype, max_context=context),
        engine=EngineConfig(
            block_tokens=block, poison=poison, backend=backend, tensor_parallel=tensor_parallel, rank_sums=rank_sums
        ),
    )
    return load_engine(config, directory, threads=1, pages=pages, cache=directory / "cache")


@torch.inference_mode()
def eager_logits(directory: Path, ids: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary] of the library's own eager attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def random_ids(n: int, seed: int, vocab: int = VOCAB) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (n,), generator=draw).tolist()


class Reference:
    """Plain ``transformers.generate``, greedy, one prompt at a time; answers are remembered."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._ids: list[int] = AutoTokenizer.from_pretrained(model_dir)(_TEXT * 28)["input_ids"]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def prompt(self, tokens: int) -> list[int]:
        """Prompts of different lengths have different beginnings."""
        return [self._ids[(tokens * 7) % 60 + i] for i in range(tokens)]

    def generate(self, prompt: Sequence[int], outputs: int) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=outputs, do_sample=False)
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]


@dataclass
class LibraryRun:
    """What the library makes of random prompts."""

    prompts: list[list[int]]
    outputs: list[list[int]]  # its greedy ids in float32
    want: list[torch.Tensor]  # its float32 logits, [outputs, vocabulary] each
    theirs: list[float]  # how far its bfloat16 logits are from them, in parts of their spread; none for float32
    parameters: list[str]  # names


@torch.inference_mode()
def library_run(directory: Path, dtype: str, lengths: Sequence[int], outputs: int) -> LibraryRun:
    """Greedy answers of ``outputs`` tokens, fed to the library once more in bfloat16 where ``dtype`` is that."""
    prompts = [random_ids(n, seed=n) for n in lengths]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    run = LibraryRun(prompts, [], [], [], [name for name, _ in model.named_parameters()])
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=outputs, do_sample=False)
        run.outputs.append(whole[0, len(prompt) :].tolist())
        run.want.append(model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1])
    if dtype == "bfloat16":
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager").eval()
        for prompt, more, logits in zip(prompts, run.outputs, run.want, strict=True):
            rough = model(torch.tensor([[*prompt, *more]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            run.theirs.append(difference(rough.float(), logits))
    return run
