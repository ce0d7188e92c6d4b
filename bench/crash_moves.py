"""What is killed between processes: a worker that publishes (put), a writer that pushes (push), a node that takes (take)."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from moonpool.bench.crash import Checked, Operation, Stage
from moonpool.bench.crash_house import BATCH, LAYOUT, House, Roll, config, content, is_right, key, member
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId, Role
from moonpool.core.membership import Member
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher
from moonpool.wire import channels

LOW, HIGH, LIFE, AT = 0, 1, 2, 3  # notes: LOW <= n < HIGH must be there; the child's incarnation; blocks begun so far


def move_operations() -> list[Operation]:
    return [_Put(), _Push(), _Take()]


class _WithHouse:
    """A node that survives; entered before the first child is forked."""

    node = "a"

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="moonpool-crash-house-")
        self.house = House(self.node, Path(self._folder.name))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.house.close()
        self._folder.cleanup()

    def run(self, folder: Path, stage: Stage) -> None:
        os.dup2(2, 1)  # what is logged is no figure
        asyncio.run(self._run(folder, stage))

    async def _run(self, folder: Path, stage: Stage) -> None:
        raise NotImplementedError

    def look(self, stage: Stage) -> Checked:
        answer = self.house.ask(do="look", low=stage.noted(LOW), high=stage.noted(HIGH))
        return Checked(answer["found"], tuple(answer["faults"]))


class _Put(_WithHouse):
    """A worker of the node's host publishes batches for ever; older ones are evicted. Its death is proved by its pidfd."""

    name = "put"

    async def _run(self, folder: Path, stage: Stage) -> None:
        me = member("writer", Role.DECODE, self.node)
        store = await WorkerStore.connect(
            self.house.store.address, me, LAYOUT, on_landed=_heed, on_failed=_heed, on_lost=lambda: None
        )
        at = stage.noted(AT)
        while True:
            blocks = [(key(n), content(key(n))) for n in range(at, at + BATCH)]
            stage.note(AT, at + BATCH)
            stage.begin()
            stored = await store.publish(blocks)
            stage.end()
            if stored != BATCH:
                raise RuntimeError(f"{stored} of {BATCH} blocks were stored")
            stage.note(LOW, stage.noted(HIGH))  # an empty range between the two
            stage.note(HIGH, at + BATCH)
            stage.note(LOW, at)
            at += BATCH

    def check(self, folder: Path, stage: Stage) -> Checked:
        return self.look(stage)


class _Push(_WithHouse):
    """A prefill worker of another node pushes whole prompts for ever; its death is told as a registry would tell it."""

    name = "push"

    async def _run(self, folder: Path, stage: Stage) -> None:
        me = member("prefill-0", Role.PREFILL, "b")
        stage.note(LIFE, me.incarnation)
        pages = np.empty((BATCH, LAYOUT.layers, LAYOUT.slice_bytes), np.uint8)
        pusher = Pusher(me, LAYOUT, pages, config(folder).transfer)
        at = stage.noted(AT)
        while True:
            keys = [key(n) for n in range(at, at + BATCH)]
            for page, one in zip(pages, keys, strict=True):
                page[:] = content(one).reshape(page.shape)
            stage.note(AT, at + BATCH)
            stage.begin()
            await _push_prompt(pusher, self.house.store, f"push-{at}", keys)
            stage.end()
            stage.note(LOW, stage.noted(HIGH))
            stage.note(HIGH, at + BATCH)
            stage.note(LOW, at)
            at += BATCH

    def check(self, folder: Path, stage: Stage) -> Checked:
        self.house.ask(do="gone", id="prefill-0", incarnation=stage.noted(LIFE), node="b")
        return self.look(stage)


async def _push_prompt(pusher: Pusher, store: Member, name: str, keys: list[bytes]) -> None:
    request = Request(
        RequestId(name), (0,) * (BATCH * LAYOUT.block_tokens), SamplingParams(max_tokens=1), bytes(16), tuple(keys)
    )
    landing = await pusher.grant(
        store, Attempt(request, 1), keys, first_block=0, tail_valid=0, reader=MemberId(""), reader_incarnation=Incarnation(0)
    )
    blocks = [(i, i, LAYOUT.block_tokens) for i in range(BATCH)]
    for layer in range(LAYOUT.layers):
        await asyncio.to_thread(landing.push_layer, 0, layer, blocks)
    await landing.drain()
    if landing.failure is not None:
        raise landing.failure.to_exception()


class _Take(_WithHouse):
    """A node takes a prompt from another one for ever, checks it and drops it; the other one must not mind its death."""

    name = "take"
    node = "b"

    def __enter__(self) -> Self:
        super().__enter__()
        self.house.ask(do="fill")
        return self

    async def _run(self, folder: Path, stage: Stage) -> None:
        stage.note(HIGH, BATCH)
        server = channels.server()
        address = f"127.0.0.1:{channels.bind(server, '127.0.0.1:0')}"
        roll = Roll([self.house.store])
        node = await StoreNode.start(config(folder), member("store-a", Role.STORE, "a", address), LAYOUT, roll)
        node.add_to(server)
        await server.start()
        reader = await WorkerStore.connect(
            address, member("reader", Role.DECODE, "a"), LAYOUT, on_landed=_heed, on_failed=_heed, on_lost=lambda: None
        )
        keys = [key(n) for n in range(BATCH)]
        while True:
            stage.begin()
            fetched = await reader.fetch(keys, NodeId("b"), self.house.store.address, 10_000)
            stage.end()
            right = [is_right(reader, slot) for slot in fetched.ticket.slots]
            if right != [True] * BATCH or fetched.bytes < BATCH * LAYOUT.block_bytes:
                raise RuntimeError(f"{len(right)} of {BATCH} blocks came, {right.count(True)} right, {fetched.bytes} bytes")
            await reader.unpin(fetched.ticket)
            node.pool.clear(None)
            node.changed()

    def check(self, folder: Path, stage: Stage) -> Checked:
        files = list(folder.glob("moonpool+*"))
        found = self.look(stage)
        left = [f"{len(files)} region files are left of nodes that died"] if len(files) > 1 else []
        return Checked(found.found, (*found.faults, *left))


def _heed(_: object) -> None:
    pass
