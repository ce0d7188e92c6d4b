"""Device pages and the host's view of them in two memories, every copy between them made as late as it may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_runner import Runner, load_tiny, random_ids
from support.lanes import coming_in, late_view, under_way

from moonpool.core.config import Config, EngineConfig, ModelConfig, SecurityConfig
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.host_view import StagedView

LAYERS, BLOCK = 3, 16


def staged(model: Path, *, pages: int = 64, poison: bool = False, zeroise: bool = False) -> Engine:
    config = Config(
        model=ModelConfig(path=str(model), dtype="float32"),
        engine=EngineConfig(block_tokens=BLOCK, poison=poison, backend="fused"),
        security=SecurityConfig(zeroise=zeroise),
    )
    return load_engine(config, model, threads=1, pages=pages, cache=model / "cache", make_view=late_view)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return staged(tiny_llama)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return load_tiny(tiny_llama, pages=64, backend="fused")


@pytest.fixture
def pages(engine: Engine) -> Iterator[list[int]]:
    held = engine.pages.allocate(8)
    yield held
    assert view_of(engine)._lanes.outward is not None and under_way(view_of(engine)) == 0
    engine.pages.release(held)


def view_of(engine: Engine) -> StagedView:
    assert isinstance(engine.view, StagedView)
    return engine.view


def device_bytes(engine: Engine, page: int, layer: int) -> torch.Tensor:
    return view_of(engine)._packing.pack([page], layer, [BLOCK])[0]


def test_a_layer_is_told_one_layer_late_and_is_on_the_host_by_then(engine: Engine, pages: list[int]) -> None:
    engine.kv_bytes[pages] = 7
    seen: list[tuple[str, int]] = []

    def after(layer: int) -> None:
        seen.append(("on", layer))
        for page, valid in zip(pages, (BLOCK, 5), strict=False):
            data = torch.from_numpy(engine.kv_bytes[page, layer]).view(torch.float32).view(-1, BLOCK, engine.layout.head_dim)
            assert data[:, :valid].any() and not data[:, valid:].any()
            assert torch.equal(torch.from_numpy(engine.kv_bytes[page, layer]), device_bytes(engine, page, layer))

    engine.forward(
        [Row(random_ids(21, 0), 0, pages, False)], before_layer=lambda layer: seen.append(("before", layer)), on_layer=after
    )
    assert seen == [
        ("before", 0),
        *[(what, layer + shift) for layer in range(LAYERS - 1) for what, shift in (("before", 1), ("on", 0))],
        ("on", LAYERS - 1),
    ]
    assert not engine.view.behind(pages[:2])


def test_what_a_hook_raises_comes_out_and_nothing_is_on_its_way_then(engine: Engine, pages: list[int]) -> None:
    ids = random_ids(20, 1)
    want = engine.forward([Row(ids, 0, pages, True)])

    for where in range(LAYERS):

        def fail(layer: int, where: int = where) -> None:
            if layer == where:
                raise KeyboardInterrupt

        for hooks in ({"before_layer": fail, "on_layer": lambda layer: None}, {"on_layer": fail}):
            with pytest.raises(KeyboardInterrupt):
                engine.forward([Row(ids, 0, pages, True)], **hooks)
            assert under_way(view_of(engine)) == 0
            assert engine.view.behind(pages[:1]), "the host may lack a layer of it"
    assert torch.equal(engine.forward([Row(ids, 0, pages, True)]), want)


def test_slices_from_outside_are_on_the_device_before_their_layer_is_computed(engine: Engine, pages: list[int]) -> None:
    """They come while the step runs, each layer just before it is needed, as a prefix load brings them."""
    ids = random_ids(40, 3)
    want = engine.forward([Row(ids, 0, pages[:3], True)], on_layer=lambda layer: None)
    kept = engine.kv_bytes[pages[:3]].copy()

    def bring(layer: int) -> None:
        for i, page in enumerate(pages[3:6]):
            engine.kv_bytes[page, layer] = kept[i, layer]
        engine.view.came_in(layer, pages[3:6])

    got = engine.forward([Row(ids[-1:], 39, pages[3:6], True)], before_layer=bring)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    engine.kv_bytes[pages[:3]] = 255  # the device has its own
    again = engine.forward([Row(ids[-1:], 39, pages[:3], True)])
    torch.testing.assert_close(again, want, atol=1e-5, rtol=1e-5)


def test_a_step_without_hooks_sees_what_came_in_and_leaves_the_host_behind(engine: Engine, pages: list[int]) -> None:
    ids = random_ids(40, 4)
    engine.kv_bytes[pages] = 0
    want = engine.forward([Row(ids, 0, pages[:3], True)])
    assert engine.view.behind(pages[2:3]) and not engine.kv_bytes[pages[2]].any()
    engine.view.gone_out(pages[:3])
    assert not engine.view.behind(pages[:3])
    engine.kv_bytes[pages[3:6]] = engine.kv_bytes[pages[:3]]
    for layer in range(LAYERS):
        engine.view.came_in(layer, pages[3:6])
    got = engine.forward([Row(ids[-1:], 39, pages[3:6], True)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_copied_page_is_private_in_both_memories(engine: Engine, pages: list[int], on_host: bool) -> None:
    """Also one whose slices came in a moment ago, and one that the host does not have yet."""
    hooks = {"on_layer": lambda layer: None} if on_host else {}
    ids = random_ids(16, 5)
    want = engine.forward([Row(ids, 0, pages, True)], **hooks)
    engine.copy_page(pages[0], pages[1])
    assert engine.view.behind([pages[1]]) is not on_host
    engine.view.gone_out(pages[:2])
    assert (engine.kv_bytes[pages[1]] == engine.kv_bytes[pages[0]]).all()
    engine.kv_bytes[pages[2]] = engine.kv_bytes[pages[0]]
    for layer in range(LAYERS):
        engine.view.came_in(layer, [pages[2]])
    engine.copy_page(pages[2], pages[3])
    got = engine.forward([Row(ids[-1:], 15, [pages[3]], True)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_answers_cold_cached_and_chunked_are_those_of_one_memory(engine: Engine, plain: Engine) -> None:
    prompts = [random_ids(n, 300 + n) for n in (1, 15, 16, 17, 50)]
    want = [Runner(plain).run([prompt], 4)[0].tokens for prompt in prompts]
    for reuse in (False, True, True):
        for chunk in (1 << 20, 11):
            got = Runner(engine, reuse=reuse).run(prompts, 4, chunk=lambda start, chunk=chunk: chunk)  # type: ignore[misc]
            assert [one.tokens for one in got] == want
    engine.pages.clear_cached()
    assert engine.pages.free == engine.pages.total


@pytest.mark.parametrize(("poison", "zeroise", "filled"), [(True, False, 0xFF), (False, True, 0)])
def test_freed_pages_are_overwritten_in_both_memories(tiny_llama: Path, poison: bool, zeroise: bool, filled: int) -> None:
    engine = staged(tiny_llama, pages=4, poison=poison, zeroise=zeroise)
    taken = engine.pages.allocate(2)
    engine.forward([Row(random_ids(20, 6), 0, taken, False)], on_layer=lambda layer: None)
    for layer in range(LAYERS):
        engine.view.came_in(layer, taken)  # the copy is to be over before the page is filled
    assert coming_in(view_of(engine))
    engine.pages.release(taken)
    assert coming_in(view_of(engine)) == 0
    for page in taken:
        assert (engine.kv_bytes[page] == filled).all()
        assert all((device_bytes(engine, page, layer) == filled).all() for layer in range(LAYERS))
    assert not engine.view.behind(taken)
    view = engine.kv_bytes
    engine.close()
    assert (view == filled).all()
