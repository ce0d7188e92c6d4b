"""Whole greedy answers of tiny models on the GPU, and what travels between its pages and the host's view of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moonpool.core.config import Config
from moonpool.core.request import SamplingParams
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.host_view import StagedView
from moonpool.engine.sampler import SamplerState, sample

BLOCK, LAYERS, OUTPUTS = 16, 4, 24
PROMPTS = [[(7 * i * n) % 128 for i in range(1, n + 1)] for n in (1, 16, 45, 200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1_024,
        eos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def load(model: Path, dtype: str = "float32", **engine: object) -> Engine:
    values = {"model": {"path": str(model), "dtype": dtype}, "engine": {"block_tokens": BLOCK, "poison": True, **engine}}
    return load_engine(Config.model_validate(values), model, threads=1, pages=128, cache=model / "cache")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    made = load(model)
    assert made.backend_name == "triton" and isinstance(made.view, StagedView)
    yield made
    assert made.pages.free == made.pages.total
    made.close()


def answer(engine: Engine, prompt: list[int], *, chunk: int = 1 << 20, hooks: bool = False) -> list[int]:
    """Greedy. With ``hooks`` nothing is replayed from a graph."""
    tokens, outputs, start = list(prompt), list[int](), 0
    pages = engine.pages.allocate(-(-(len(prompt) + OUTPUTS) // BLOCK))
    given = {"on_layer": lambda layer: None} if hooks else {}
    while len(outputs) < OUTPUTS:
        end = min(start + chunk, len(tokens))
        logits = engine.forward([Row(tokens[start:end], start, pages, end == len(tokens))], **given)
        if end == len(tokens):
            state = SamplerState(SamplingParams(max_tokens=OUTPUTS, temperature=0), prompt, outputs)
            outputs.append(sample(logits, [state], engine.eos_ids)[0].token)
            tokens.append(outputs[-1])
        start = end
    engine.pages.release(pages)
    return outputs


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_answers_equal_those_of_the_cpu_with_graphs_and_without_whole_and_in_chunks(
    engine: Engine, model: Path, prompt: list[int]
) -> None:
    want = answer(load(model, device="cpu", backend="fused"), prompt)
    assert answer(engine, prompt) == want
    assert answer(engine, prompt, hooks=True) == want
    assert answer(engine, prompt, chunk=33) == want


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_answers_with_pages_in_eight_bits_do_not_depend_on_chunks_or_graphs(model: Path, kept: str) -> None:
    engine = load(model, "bfloat16", kv_dtype=kept)
    want = answer(engine, PROMPTS[2], hooks=True)
    assert answer(engine, PROMPTS[2]) == want
    assert answer(engine, PROMPTS[2], chunk=16) == want


def test_each_layer_is_on_the_host_when_it_is_told_and_comes_back_from_there(engine: Engine) -> None:
    pages, told = engine.pages.allocate(26), list[int]()
    view, prompt = engine.view, PROMPTS[3]
    assert isinstance(view, StagedView)

    def on_layer(layer: int) -> None:
        told.append(layer)
        for page in pages[:12]:
            there = view._packing.pack([page], layer, [BLOCK])[0].cpu()
            assert torch.equal(torch.from_numpy(engine.kv_bytes[page, layer]), there)

    want = engine.forward([Row(prompt, 0, pages[:13], True)], on_layer=on_layer)
    assert told == list(range(LAYERS)) and not view.behind(pages[:13])
    kept = engine.kv_bytes[pages[:13]].copy()

    def bring(layer: int) -> None:
        engine.kv_bytes[pages[13:], layer] = kept[:, layer]
        view.came_in(layer, pages[13:])

    got = engine.forward([Row(prompt[-1:], len(prompt) - 1, pages[13:], True)], before_layer=bring)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    assert view.behind(pages[25:])
    view.gone_out(pages[13:])
    assert (engine.kv_bytes[pages[13:25]] == kept[:12]).all()
    engine.copy_page(pages[0], pages[1])
    assert (engine.kv_bytes[pages[1]] == kept[0]).all()
    engine.pages.release(pages)
    assert (engine.kv_bytes[pages] == 0xFF).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_two_gpus_answer_as_one_does_and_go_on_with_what_came_to_the_host(model: Path, engine: Engine, kept: str) -> None:
    """Each has one of two K/V heads. What they sent to the host's view comes in again under other pages."""
    two = load(model, kv_dtype=kept, tensor_parallel=2)
    assert two.backend_name == "triton" and "2 ranks" in two.backend_note
    for prompt in PROMPTS:
        for hooks in (False, True):
            got = answer(two, prompt, hooks=hooks)
            assert kept != "auto" or got == answer(engine, prompt)
    ids = PROMPTS[2]
    pages = two.pages.allocate(6)
    want = two.forward([Row(ids, 0, pages[:3], True)], on_layer=lambda layer: None).clone()
    two.kv_bytes[pages[3:]] = two.kv_bytes[pages[:3]]
    for layer in range(LAYERS):
        two.view.came_in(layer, pages[3:])
    got_again = two.forward([Row(ids[-1:], len(ids) - 1, pages[3:], True)])
    torch.testing.assert_close(got_again, want, atol=1e-3, rtol=1e-3)
    two.pages.release(pages)
    two.close()
