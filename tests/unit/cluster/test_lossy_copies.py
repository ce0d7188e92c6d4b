"""Role both beside a store node whose full blocks were replaced by lossy copies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.split import split_path

from moonpool.cluster.both import BothWorker


@pytest.mark.parametrize("served", [True, False], ids=["model listed", "nobody listed"])
async def test_a_prefix_comes_from_lossy_copies_where_the_model_allows_them(
    tmp_path: Path, tiny_model: Path, served: bool
) -> None:
    prompt = random.Random(3).choices(range(128), k=100)
    async with split_path(tmp_path, tiny_model, prefills=0, decode_kind=BothWorker) as split:
        store = split.stores["a"]
        first = split.asker.request(prompt, max_tokens=6)
        await split.gateway.ask(first)
        await split.idle()
        await split.clear_device_pages()
        allowing = {"codecs": ("int8",), "lossy_for": (store.layout.model,)}
        store.config = store.config.model_copy(update={"store": store.config.store.model_copy(update=allowing)})
        made = await store.compressor.compress(first.keys, "int8", dry_run=False)
        assert (made.made, made.kept) == (6, 0)
        assert made.bytes_after < made.bytes_before
        if not served:
            barring = {"store": store.config.store.model_copy(update={"lossy_for": ()})}
            store.config = store.config.model_copy(update=barring)
        again = split.asker.request(prompt, max_tokens=6)
        answer = await split.gateway.ask(again)
        await split.idle()
        assert len(answer.ids) == 6
        assert answer.cached_tokens == (96 if served else 0)
        if not served:
            assert answer.ids == split.oracle(again)
