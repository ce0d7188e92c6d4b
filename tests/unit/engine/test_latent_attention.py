"""Models whose pages hold latents against the library, which expands them: cold, in chunks, cached, and with bytes from another
engine.

In float32 the ids are the library's own greedy ids. In bfloat16, fed those ids, no way leads further from the library's float32
logits than the library's own bfloat16 does, up to half as much again, but for one prompt of nine in models with experts:
rounding may choose another one where two nearly tie. Every byte that nobody wrote is NaN, and page tables are shuffled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiled_runner import rounded_tiny
from engine_runner import Runner, Transcript, eager_logits, hand_over, library_run, load_tiny, random_ids, save_tiny
from latent_models import LATENT, SHAPE, YARN
from transformers import DeepseekV2Config

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError, UnsupportedModel
from moonpool.engine.engine import Engine, Row, load_engine, memory_budget
from moonpool.engine.trial import difference

LENGTHS = (70, 48, 33, 32, 31, 17, 16, 15, 1)  # around borders of blocks, and past what yarn's model was made for
OUTPUTS = 6
BLOCK = 16
ROUNDING = 5e-5  # of float32 logits
MOST_APART = 0.03  # of the spread of logits: no bound is wider


@dataclass
class Served:
    directory: Path
    engine: Engine
    dtype: str
    prompts: list[list[int]]
    outputs: list[list[int]]  # the library's greedy ids
    want: list[torch.Tensor]  # its float32 logits, [OUTPUTS, vocabulary] each
    bound: float  # of bfloat16, but for ``beyond`` prompts
    beyond: int

    def run(self, *, reuse: bool = False, chunk: int = 1 << 30) -> list[Transcript]:
        _shuffle(self.engine)
        forced = None if self.dtype == "float32" else self.outputs
        return Runner(self.engine, reuse=reuse).run(self.prompts, OUTPUTS, chunk=lambda start: chunk, forced=forced)

    def check(self, got: list[Transcript], what: str) -> None:
        beyond = 0
        for one, ids, want in zip(got, self.outputs, self.want, strict=True):
            assert one.tokens == ids, what
            logits = torch.stack(one.logits)
            if self.dtype == "float32":
                torch.testing.assert_close(logits, want, atol=ROUNDING, rtol=1e-5, msg=lambda said: f"{what}: {said}")
            else:
                beyond += difference(logits, want) > self.bound
        assert beyond <= self.beyond, what


def _shuffle(engine: Engine) -> None:
    """What is allocated next lies anywhere."""
    free = engine.pages.allocate(engine.pages.free)
    engine.pages.release(random.Random(3).sample(free, len(free)))


def _served(directory: Path, dtype: str) -> Served:
    library = library_run(directory, dtype, LENGTHS, OUTPUTS)
    theirs = library.theirs
    beyond = int(any("experts.gate_up" in name for name in library.parameters))
    bound = 1.5 * max(sorted(theirs)[: len(theirs) - beyond], default=0.0)
    assert bound < MOST_APART
    engine = load_tiny(directory, pages=64, poison=True, dtype=dtype)
    return Served(directory, engine, dtype, library.prompts, library.outputs, library.want, bound, beyond)


@pytest.fixture(scope="module", params=[(kind, dtype) for kind in LATENT for dtype in ("float32", "bfloat16")], ids=": ".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, dtype = request.param
    found = _served(rounded_tiny(tmp_path_factory.mktemp("latent"), LATENT[kind]), dtype)
    yield found
    found.engine.pages.clear_cached()
    assert found.engine.pages.free == found.engine.pages.total
    found.engine.close()


def test_cold_prompts_and_chunks_at_odd_borders_beside_decode_rows(served: Served) -> None:
    for chunk in (1 << 30, 16, 13, 1):
        served.check(served.run(chunk=chunk), f"chunks of {chunk}")


def test_behind_a_cached_prefix_and_wholly_cached(served: Served) -> None:
    for cached in (False, True, True):
        got = served.run(reuse=True, chunk=13)
        assert [one.cached for one in got] == [min(n // BLOCK * BLOCK, n - 1) if cached else 0 for n in LENGTHS]
        served.check(got, f"cached: {cached}")


def test_with_bytes_that_another_engine_computed_and_the_valid_tokens_of_its_last_block(served: Served) -> None:
    other = load_tiny(served.directory, pages=64, poison=True, dtype=served.dtype)
    got = [_split(served, i, other, served.engine) for i in range(len(LENGTHS))]
    served.check(got, "another engine's bytes")
    other.close()


def _split(served: Served, i: int, prefill: Engine, decode: Engine) -> Transcript:
    prompt, seen = served.prompts[i], Transcript()
    there = prefill.pages.allocate(-(-len(prompt) // BLOCK))
    logits = prefill.forward([Row(prompt, 0, there, True)])[0].clone()
    here = hand_over(prefill, there, decode, len(prompt))
    prefill.pages.release(there)
    here += decode.pages.allocate(-(-(len(prompt) + OUTPUTS) // BLOCK) - len(here))
    for position in range(OUTPUTS):
        seen.logits.append(logits)
        seen.tokens.append(int(logits.argmax()) if served.dtype == "float32" else served.outputs[i][position])
        logits = decode.forward([Row(seen.tokens[-1:], len(prompt) + position, here, True)])[0].clone()
    decode.pages.release(here)
    return seen


def test_pages_hold_latents_alone_and_hooks_find_them(served: Served) -> None:
    engine, layout = served.engine, served.engine.layout
    assert (layout.kind, layout.kv_heads, layout.head_dim) == ("mla", 1, SHAPE["kv_lora_rank"] + SHAPE["qk_rope_head_dim"])
    assert engine.kv_bytes.shape == (engine.pages.total, layout.layers, layout.block_tokens * layout.row_bytes)
    pages = engine.pages.allocate(2)
    engine.kv_bytes[pages] = 0
    seen: list[tuple[str, int, bool]] = []

    def say(what: str, layer: int) -> None:
        seen.append((what, layer, bool(engine.kv_bytes[pages[0], layer].any())))

    ids = random_ids(20, 5)
    engine.forward([Row(ids, 0, pages, False)], before_layer=lambda i: say("before", i), on_layer=lambda i: say("on", i))
    assert seen == [(what, layer, what == "on") for layer in range(layout.layers) for what in ("before", "on")]
    rows = engine.kv_bytes[pages[1]].reshape(layout.layers, layout.block_tokens, layout.row_bytes)
    assert rows[:, :4].any(axis=2).all()
    assert not rows[:, 4:].any()
    engine.copy_page(pages[1], pages[0])
    assert (engine.kv_bytes[pages[0]] == engine.kv_bytes[pages[1]]).all()
    engine.pages.release(pages)
    assert (engine.kv_bytes[pages] == 0xFF).all(), "poison"


@pytest.fixture(scope="module")
def plain_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v2"), DeepseekV2Config(**SHAPE, q_lora_rank=None))


def test_the_memory_budget_counts_one_row_a_token_and_layer(plain_v2: Path) -> None:
    model = ModelConfig(path=str(plain_v2), dtype="bfloat16")
    budget = memory_budget(Config(model=model, engine=EngineConfig(block_tokens=BLOCK, page_bytes=1 << 20)), plain_v2)
    assert budget.page_bytes == 2 * BLOCK * 32 * 2
    assert budget.pages == (1 << 20) // budget.page_bytes


@pytest.mark.parametrize("backend", ["compiled", "fused"])
def test_backends_that_do_not_compute_it_say_so(plain_v2: Path, backend: str) -> None:
    config = Config(
        model=ModelConfig(path=str(plain_v2), dtype="bfloat16"),
        engine=EngineConfig(block_tokens=BLOCK, backend=backend),
    )
    with pytest.raises(ConfigError, match="latent"):
        load_engine(config, plain_v2, threads=1, pages=4, cache=plain_v2)
    auto = load_tiny(plain_v2, pages=4)
    assert auto.backend_name == "torch"
    assert "latent" in auto.backend_note
    auto.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"qk_rope_head_dim": 7}, "even rotary dimension"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"]}, "deepseek_v2 and deepseek_v3"),
    ],
)
def test_what_the_librarys_classes_would_compute_otherwise_is_refused(
    plain_v2: Path, tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    for file in plain_v2.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    raw = json.loads((plain_v2 / "config.json").read_text()) | changed
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=reason):
        load_tiny(tmp_path)


def test_a_configuration_as_checkpoints_carry_it_is_read_right(tmp_path: Path) -> None:
    """Rotary settings by their old names, code of its own that is never run, and settings that only training reads."""
    save_tiny(tmp_path, DeepseekV2Config(**SHAPE, q_lora_rank=None, rope_parameters=YARN))
    want = eager_logits(tmp_path, ids := random_ids(90, 8))
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), "beta_fast": 32, "beta_slow": 1, **rope},
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
    }
    file.write_text(json.dumps(raw))
    engine = load_tiny(tmp_path)
    got = Runner(engine).run([ids[:80]], 10, forced=[ids[80:]])[0]
    torch.testing.assert_close(torch.stack(got.logits), want[79:-1], atol=ROUNDING, rtol=1e-5)
    engine.close()
