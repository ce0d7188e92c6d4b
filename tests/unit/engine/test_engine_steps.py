"""Forward passes as workers use them: hooks, failures, memory views, several engines, every border on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_runner import Runner, assert_same, eager_logits, load_tiny, random_ids, save_tiny
from transformers import LlamaConfig

from moonpool.core.config import Config
from moonpool.core.errors import Bug
from moonpool.engine.engine import Engine, Row, load_engine

LAYERS = 3


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return load_tiny(tiny_llama, pages=64)


@pytest.fixture
def pages(engine: Engine) -> Iterator[list[int]]:
    held = engine.pages.allocate(8)
    yield held
    engine.pages.release(held)


def test_hooks_fire_once_per_layer_and_find_the_slices_written(engine: Engine, pages: list[int]) -> None:
    engine.kv_bytes[pages] = 0
    seen: list[tuple[str, int]] = []

    def before(layer: int) -> None:
        seen.append(("before", layer))
        assert not engine.kv_bytes[pages[0], layer].any()

    def after(layer: int) -> None:
        seen.append(("on", layer))
        assert engine.kv_bytes[pages[0], layer].any()

    engine.forward([Row(random_ids(16, 0), 0, pages, False)], before_layer=before, on_layer=after)
    assert seen == [(what, layer) for layer in range(LAYERS) for what in ("before", "on")]


def test_what_a_hook_raises_comes_out_and_the_engine_goes_on(engine: Engine, pages: list[int]) -> None:
    ids = random_ids(20, 1)
    want = engine.forward([Row(ids, 0, pages, True)])

    def fail(layer: int) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    for hooks in ({"before_layer": fail}, {"on_layer": fail}):
        with pytest.raises(KeyboardInterrupt):
            engine.forward([Row(ids, 0, pages, True)], **hooks)
    assert torch.equal(engine.forward([Row(ids, 0, pages, True)]), want)


def test_the_byte_view_keeps_the_first_tokens_where_the_layout_says(engine: Engine, pages: list[int]) -> None:
    """K/V of three tokens, computed alone and as the beginning of sixteen, are the same in ``pieces(3)`` and nowhere else."""
    layout = engine.layout
    assert engine.kv_bytes.shape == (engine.pages.total, LAYERS, layout.slice_bytes)
    ids = random_ids(16, 2)
    engine.kv_bytes[pages[:2]] = 0
    engine.forward([Row(ids, 0, pages[:1], False)])
    engine.forward([Row(ids[:3], 0, pages[1:2], False)])
    whole, part = (torch.from_numpy(engine.kv_bytes[page].copy()) for page in pages[:2])
    assert len(layout.pieces(3)) == 2 * layout.kv_heads
    for offset, length in layout.pieces(3):
        here = slice(offset, offset + length)
        a, b = (bytes_of[:, here].contiguous().view(torch.float32) for bytes_of in (whole, part))
        assert a.any()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        part[:, here] = 0
    assert not part.any()


def test_bytes_moved_to_other_pages_serve_the_same_logits(engine: Engine, pages: list[int]) -> None:
    ids = random_ids(40, 3)
    want = engine.forward([Row(ids, 0, pages[:3], True)])
    engine.kv_bytes[pages[3:6]] = engine.kv_bytes[pages[:3]]
    engine.kv_bytes[pages[:3]] = 255
    got = engine.forward([Row(ids[-1:], 39, pages[3:6], True)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_copied_page_is_private(engine: Engine, pages: list[int]) -> None:
    engine.forward([Row(random_ids(16, 4), 0, pages, False)])
    engine.copy_page(pages[0], pages[1])
    assert (engine.kv_bytes[pages[0]] == engine.kv_bytes[pages[1]]).all()
    engine.kv_bytes[pages[1]] = 0
    assert engine.kv_bytes[pages[0]].any()


def test_only_rows_that_want_logits_get_them_in_their_order(engine: Engine, pages: list[int]) -> None:
    a, b, c = (random_ids(n, n) for n in (5, 7, 9))
    alone = [engine.forward([Row(ids, 0, [pages[0]], True)])[0] for ids in (a, c)]
    rows = [Row(a, 0, [pages[0]], True), Row(b, 0, [pages[1]], False), Row(c, 0, [pages[2]], True)]
    torch.testing.assert_close(engine.forward(rows), torch.stack(alone), atol=1e-5, rtol=1e-5)
    none = engine.forward([Row(a, 0, [pages[0]], False)])
    assert none.shape == (0, engine.vocab_size)
    assert none.dtype is torch.float32


@pytest.mark.parametrize(
    ("tokens", "start", "table"),
    [([], 0, 1), ([1], -1, 1), ([1], 16, 1), ([1] * 17, 0, 1), ([1], 512, 33)],
    ids=["no tokens", "before the start", "past its pages", "more than its pages", "past the context"],
)
def test_an_impossible_row_is_a_bug(engine: Engine, pages: list[int], tokens: list[int], start: int, table: int) -> None:
    with pytest.raises(Bug, match="row of"):
        engine.forward([Row(tokens, start, (pages * 5)[:table], True)])


def test_two_engines_compute_inside_one_another(tiny_llama: Path, tmp_path: Path) -> None:
    """A forward pass of the second runs between two layers of the first."""
    other_dir = save_tiny(
        tmp_path,
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8
        ),
        seed=1,
    )
    first, second = load_tiny(tiny_llama), load_tiny(other_dir, block=32, context=64)
    ids = random_ids(30, 6)
    one, two = first.pages.allocate(2), second.pages.allocate(1)
    inner: list[torch.Tensor] = []
    outer = first.forward([Row(ids, 0, one, True)], on_layer=lambda _: inner.append(second.forward([Row(ids, 0, two, True)])))
    torch.testing.assert_close(outer[0], eager_logits(tiny_llama, ids)[-1], atol=2e-5, rtol=1e-5)
    assert len(inner) == LAYERS
    for logits in inner:
        torch.testing.assert_close(logits[0], eager_logits(other_dir, ids)[-1], atol=2e-5, rtol=1e-5)


def test_no_nan_reaches_logits_with_every_dead_page_poisoned(tiny_llama: Path) -> None:
    """Lengths 1 to 50 in a pool so small that pages are evicted and used again, with and without cached prefixes."""
    engine = load_tiny(tiny_llama, pages=26, poison=True)
    clean = load_tiny(tiny_llama, pages=26)
    ids = random_ids(50, 7)
    for reuse in (False, True):
        for n in range(1, 51):
            prompts = [ids[:n], random_ids(n, 100 + n), ids[: 51 - n]]
            got = Runner(engine, reuse=reuse).run(prompts, 3, chunk=lambda start: 11)
            want = Runner(clean).run(prompts, 3, chunk=lambda start: 11)
            for a, b in zip(got, want, strict=True):
                assert_same(a, b.tokens, f"length {n}")
                torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=1e-4, rtol=1e-4)
    engine.pages.clear_cached()
    assert engine.pages.free == engine.pages.total
    whole = torch.from_numpy(engine.kv_bytes).view(torch.float32)
    assert torch.isnan(whole).all()


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_sent_three_times_answers_alike(engine: Engine, length: int) -> None:
    ids = random_ids(length, 200 + length)
    cold, warm, again = (Runner(engine, reuse=True).run([ids], 6)[0] for _ in range(3))
    assert cold.cached == 0
    assert warm.cached == again.cached == min(length // 16 * 16, length - 1)
    for one in (warm, again):
        assert_same(one, cold.tokens, f"length {length}")
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(cold.logits), atol=2e-5, rtol=1e-5)


def test_every_chunk_border_gives_the_same_answer(engine: Engine, tiny_llama: Path) -> None:
    ids = random_ids(45, 9)
    want = eager_logits(tiny_llama, ids)[-1]
    for border in range(1, 45):
        got = Runner(engine).run([ids], 1, chunk=lambda start, at=border: at if not start else 100)[0]  # type: ignore[misc]
        torch.testing.assert_close(got.logits[0], want, atol=2e-5, rtol=1e-5)


def test_a_batch_of_sixteen_answers_as_each_alone(engine: Engine) -> None:
    prompts = [random_ids(1 + 3 * i, 300 + i) for i in range(16)]
    alone = [Runner(engine).run([prompt], 5)[0] for prompt in prompts]
    batch = Runner(engine).run(prompts, 5)
    for a, b in zip(alone, batch, strict=True):
        assert_same(b, a.tokens, "batch")
        torch.testing.assert_close(torch.stack(b.logits), torch.stack(a.logits), atol=2e-5, rtol=1e-5)


def test_a_closed_engine_leaves_views_usable(tiny_llama: Path) -> None:
    engine = load_tiny(tiny_llama)
    view = engine.kv_bytes
    engine.close()
    assert not view.any()


def test_loading_stays_out_of_openmp_so_that_the_compute_thread_has_the_only_team(tiny_llama: Path) -> None:
    """Two teams on the same cores make the OpenMP runtime yield at every barrier: half as fast."""
    config = Config.model_validate({"model": {"path": str(tiny_llama), "dtype": "float32"}, "engine": {"pages": 4}})
    with ThreadPoolExecutor(1) as loading, ThreadPoolExecutor(1) as computing:
        engine = loading.submit(lambda: load_engine(config, tiny_llama, threads=2, cache=tiny_llama)).result()
        computing.submit(lambda: engine.forward([Row([1, 2, 3], 0, [0], True)])).result()
        assert loading.submit(torch.get_num_threads).result() == 1
        assert computing.submit(torch.get_num_threads).result() == 2
    engine.close()
