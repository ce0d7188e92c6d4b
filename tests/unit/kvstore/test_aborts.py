"""Reader and writer of one transfer that both break off, in any order, again and again with a pool that just suffices."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.store import LAYOUT, MappedWriter, Roll, block_keys, config, member, store_node, until, worker, writer

from moonpool.core.ids import Role
from moonpool.core.landing import Landing
from moonpool.core.membership import Liveness
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode

SLOTS, ROUNDS = 8, 50


async def abort_both(
    rng: random.Random, node: StoreNode, roll: Roll, client: WorkerStore, remote: MappedWriter, landing: Landing, round: int
) -> None:
    """The client leaves, the writer breaks off; slots come free by the writer's word or its death, and not before."""
    frames = [
        remote.frame(landing, layer, [remote.write(slot, layer, noise(rng)) for slot in landing.slots]) for layer in (0, 1)
    ]
    await remote.notify(frames[0])

    async def reader_leaves() -> None:
        await client.end_landing(landing.id)

    async def writer_falls_silent() -> None:
        roll.say(remote.me, Liveness.SILENT)

    steps: list[Callable[[], Awaitable[None]]] = [reader_leaves, writer_falls_silent]
    rng.shuffle(steps)
    for step in steps:
        await step()
        assert node.numbers()["slots_free"] == 0, "the writer may still write"
    await remote.notify(frames[1])  # a late signal of a late write
    assert node.numbers()["slots_fenced"] == SLOTS
    assert (await remote.ask(f"other-{round}", block_keys("o", 1))).error.reason in ("busy", "peer_silent")
    if rng.random() < 0.5:
        await remote.drain(landing)
    else:
        roll.say(remote.me, Liveness.GONE)
        await until(lambda: node.numbers()["slots_free"] == SLOTS, "its death is a proof")
    assert node.numbers()["slots_free"] == SLOTS
    await remote.drain(landing)
    await remote.notify(frames[0])
    await client.end_landing(landing.id)


def noise(rng: random.Random) -> NDArray[np.uint8]:
    return np.frombuffer(rng.randbytes(LAYOUT.block_bytes), np.uint8)


async def test_slots_of_transfers_that_both_sides_abort_return_after_proof_and_all_of_them(tmp_path: Path) -> None:
    rng, roll = random.Random(15), Roll()
    async with store_node(config(tmp_path, slots=SLOTS), roll) as node, worker(node) as (client, heard):
        for round in range(ROUNDS):
            roll.say(member("prefill-0", Role.PREFILL, "b", incarnation=round + 1))
            async with writer(node, incarnation=round + 1) as remote:
                landing = await remote.grant(
                    f"r{round}", block_keys(f"k{round}-", SLOTS), reader="decode-0", reader_incarnation=1
                )
                await abort_both(rng, node, roll, client, remote, landing, round)
        numbers = node.numbers()
        assert (numbers["slots_free"], numbers["landings_open"], numbers["pins"]) == (SLOTS, 0, 0)
        assert numbers["drains_ignored"] >= ROUNDS
        assert numbers["notices_ignored"] == 2 * ROUNDS
        assert not heard.lost
