"""Models of one shape but different weights or dtype beside one store node: no hit across, no answer changed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.other_weights import other_weights
from support.split import Split, split_path
from support.workers import Asker, Gateway, generate, member, ref

from moonpool.cluster.both import BothWorker
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Placement
from moonpool.engine.engine import load_engine
from moonpool.wire import channels


@asynccontextmanager
async def second(split: Split, model: Path, **changes: Any) -> AsyncIterator[Split]:
    """Another worker of role both on the same node, with a model of its own; ``split`` as it sees it."""
    settings = split.config.model_copy(update={"model": split.config.model.model_copy(update={"path": str(model), **changes})})
    async with AsyncExitStack() as stack:
        engine = load_engine(settings, model, threads=1, cache=model)
        stack.callback(engine.close)
        server = channels.server()
        port = server.add_insecure_port("127.0.0.1:0")
        me = member("both-1", Role.BOTH, engine.layout, node=split.decode_member.node, address=f"127.0.0.1:{port}")
        worker = await BothWorker.start(settings, engine, me, split.crowd)
        stack.push_async_callback(worker.close)
        worker.add_to(server)
        await server.start()
        stack.push_async_callback(server.stop, 0.2)
        split.crowd.tell(MemberChange(me, Liveness.LIVE))
        gateway = Gateway(worker, Placement(ref(me), ref(me)))
        stack.push_async_callback(gateway.close)
        yield replace(
            split, decode=worker, decode_member=me, decode_engine=engine, gateway=gateway, asker=Asker(settings, engine.layout)
        )


async def asked(split: Split, prompt: list[int]) -> tuple[int, list[int]]:
    """(cached tokens, ids), equal to this model's own bare generation."""
    request = split.asker.request(prompt, max_tokens=8)
    answer = await split.gateway.ask(request)
    await split.idle()
    assert answer.error is None
    assert answer.ids == generate(split.decode_engine, request)
    return answer.cached_tokens, answer.ids


@pytest.mark.parametrize("differs", ["weights", "dtype"])
async def test_the_same_prompt_to_two_models_that_share_a_store_hits_only_its_own_models_blocks(
    tmp_path: Path, tiny_model: Path, differs: str
) -> None:
    prompt = random.Random(27).choices(range(128), k=100)
    model = other_weights(tiny_model, tmp_path / "other") if differs == "weights" else tiny_model
    changes = {} if differs == "weights" else {"dtype": "bfloat16"}
    async with (
        split_path(tmp_path, tiny_model, prefills=0, decode_kind=BothWorker, slots=64) as one,
        second(one, model, **changes) as two,
    ):
        store = one.stores["a"]
        cold = [await asked(one, prompt), await asked(two, prompt)]
        assert [cached for cached, _ in cold] == [0, 0]
        assert one.asker.request(prompt).keys != two.asker.request(prompt).keys
        blocks = store.numbers()["blocks_findable"]
        assert blocks == 12
        for split in (one, two):
            await split.clear_device_pages()
        warm = [await asked(one, prompt), await asked(two, prompt)]
        assert [cached for cached, _ in warm] == [96, 96], "each from the pool"
        assert [ids for _, ids in warm] == [ids for _, ids in cold]
        if differs == "weights":
            assert cold[0][1] != cold[1][1]
        assert store.numbers()["blocks_findable"] == blocks
