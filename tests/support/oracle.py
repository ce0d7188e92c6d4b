"""The one oracle: the library's own greedy generation with its own cache, no reuse, fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

TIE = 1e-4  # two best logits this close are a tie: another path may pick the other one


@dataclass
class Comparison:
    sequences: int = 0
    ties: list[str] = field(default_factory=list)

    def allow(self) -> None:
        """At most 1 % of sequences may differ at a tie (one is always allowed)."""
        for tie in self.ties:
            print(tie)
        assert len(self.ties) <= max(1, self.sequences // 100), self.ties


class Oracle:
    """Greedy continuations of token-id prompts; answers are kept, so asking twice is free."""

    def __init__(self, model_dir: Path, threads: int = 2) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self.comparison = Comparison()

    @cached_property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def greedy(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """``tokens`` ids after ``prompt``, end-of-sequence ignored."""
        key = (tuple(prompt), tokens)
        if key not in self._known:
            torch = self._torch
            ids = torch.tensor([key[0]])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._known[key] = tuple(out[0, len(prompt) :].tolist())
        return self._known[key]

    def logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Of each id of ``prompt`` but the first, after those before it."""
        torch = self._torch
        with torch.inference_mode():
            all_of_them = torch.log_softmax(self._model(torch.tensor([list(prompt)])).logits[0, :-1], dim=-1)
        found: list[float] = all_of_them[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
        return found

    def check_at_once(self, prompt: Sequence[int], got: Sequence[int], what: str) -> None:
        """As ``check``, in one pass over prompt and answer: every id is the best one after those before it, or tied with it."""
        torch = self._torch
        self.comparison.sequences += 1
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *got[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        behind = best - logits[torch.arange(len(got)), torch.tensor(got)]
        wrong = [i for i, gap in enumerate(behind.tolist()) if gap > TIE]
        assert not wrong, (
            f"{what}: prompt of {len(prompt)}, output {wrong[0]} is {got[wrong[0]]}, {behind[wrong[0]]:.2e} behind"
        )

    def check(self, prompt: Sequence[int], got: Sequence[int], what: str) -> None:
        """Raise unless ``got`` is the greedy continuation, or leaves it first at a tie (noted in ``comparison``)."""
        want = self.greedy(prompt, len(got))
        self.comparison.sequences += 1
        if tuple(got) == want:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *want[:at]]])).logits[0, -1]
        best = torch.topk(logits, 2)
        gap = float(best.values[0] - best.values[1])
        note = f"{what}: prompt of {len(prompt)}, output {at}: {got[at]} for {want[at]}, best two differ by {gap:.2e}"
        assert gap <= TIE and got[at] in best.indices.tolist(), note
        self.comparison.ties.append(note)
