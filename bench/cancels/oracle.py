"""Answers known beforehand: the library's own greedy generation in fp32, without any cache of ours."""

from __future__ import annotations

from pathlib import Path
from random import Random

from moonpool.bench.cancels.scenes import Known

GAP = 1e-3  # between the two best logits at every position: closer ones are ties, where another path may differ


def known_answers(model_dir: Path, seed: int, count: int, ids: tuple[int, int]) -> list[Known]:
    """``count`` random prompts of 17 to 300 tokens with answers of 4 to 24."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    random, found = Random(seed), list[Known]()
    while len(found) < count:
        prompt = [random.randrange(*ids) for _ in range(random.randint(17, 300))]
        given = torch.tensor([prompt])
        with torch.inference_mode():
            tokens = random.randint(4, 24)
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            best = torch.topk(model(out).logits[0, len(prompt) - 1 : -1], 2).values
        if float((best[:, 0] - best[:, 1]).min()) > GAP:
            found.append(Known(tuple(prompt), tuple(out[0, len(prompt) :].tolist())))
    return found
