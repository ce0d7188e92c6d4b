"""A thousand faults, in slots and on the wire: whatever a reader gets is right or a miss, and everything comes free."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.store import LAYOUT, block_bytes
from support.stores import Stores, block_keys, stores

from moonpool.core.errors import DigestMismatch
from moonpool.core.landing import SlotRef
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb

BLOCKS = 12
USED = LAYOUT.block_bytes + 8 * LAYOUT.layers  # of a slot: the rest is padding
SLOT_FAULTS, WIRE_FAULTS = 800, 200

Region = NDArray[np.uint8]
Slot = tuple[Region, int]


def bytes_of(slot: Slot) -> Region:
    return slot[0][slot[1] : slot[1] + USED]


def flip_a_bit(rng: random.Random, slot: Slot, others: Sequence[Region]) -> None:
    bytes_of(slot)[rng.randrange(USED)] ^= 1 << rng.randrange(8)


def put_another_block_there(rng: random.Random, slot: Slot, others: Sequence[Region]) -> None:
    bytes_of(slot)[:] = rng.choice(others)


def exchange_two_layers(rng: random.Random, slot: Slot, others: Sequence[Region]) -> None:
    one, two = rng.sample(range(LAYOUT.layers), 2)
    first, second = (slices.slice_of(LAYOUT, *slot, layer) for layer in (one, two))
    first[:], second[:] = second.copy(), first.copy()
    trailer = slices.trailer_of(LAYOUT, *slot)
    trailer[one], trailer[two] = trailer[two], trailer[one]


def write_part_of_an_older_block(rng: random.Random, slot: Slot, others: Sequence[Region]) -> None:
    cut = rng.randrange(1, USED)
    bytes_of(slot)[:cut] = rng.choice(others)[:cut]


FAULTS: list[Callable[[random.Random, Slot, Sequence[Region]], None]] = [
    flip_a_bit,
    put_another_block_there,
    exchange_two_layers,
    write_part_of_an_older_block,
]


def read(client: WorkerStore, ref: SlotRef) -> bool:
    """Whether the block is right; False: a miss. Wrong bytes raise AssertionError."""
    into, right = np.empty(LAYOUT.slice_bytes, np.uint8), block_bytes(ref.key)
    for layer in range(LAYOUT.layers):
        try:
            client.read_slice(ref, layer, into, LAYOUT.block_tokens)
        except DigestMismatch:
            return False
        assert (into == slices.slice_of(LAYOUT, right, 0, layer)).all(), f"wrong bytes of {ref.key!r} were served"
    return True


async def read_all(client: WorkerStore, keys: Sequence[bytes]) -> Counter[bool]:
    """As a worker does: what fails its digest is quarantined."""
    ticket, seen = await client.pin(keys), Counter[bool]()
    for ref in ticket.slots:
        right = read(client, ref)
        seen[right] += 1
        if not right:
            await client.quarantine(ref.key, 0, "test")
    await client.unpin(ticket)
    return seen


async def fresh(s: Stores, node: str, name: str) -> list[bytes]:
    """New blocks in the slots of the former ones."""
    await s.workers[node]._stub.Clear(pb.store.KeysRequest())
    keys = block_keys(name, BLOCKS)
    await s.publish(node, keys)
    return keys


async def test_eight_hundred_faults_in_slots_serve_no_wrong_byte_here_or_at_another_node(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with stores(tmp_path, "a", "b", slots=BLOCKS) as s:
        author, injected, missed = s.workers["a"], 0, 0
        older = [np.zeros(USED, np.uint8)]
        while injected < SLOT_FAULTS:
            keys = await fresh(s, "a", f"r{injected}-")
            ticket = await author.pin(keys)
            slots = [(author.regions[ref.region], ref.offset) for ref in ticket.slots]
            await author.unpin(ticket)
            whole = [bytes_of(slot).copy() for slot in slots]
            hit = rng.sample(range(BLOCKS), rng.randint(4, BLOCKS))
            for i in hit:
                rng.choice(FAULTS)(rng, slots[i], [w for j, w in enumerate(whole) if j != i] + older)
            bad = sum((bytes_of(slot) != right).any() for slot, right in zip(slots, whole, strict=True))
            injected, older = injected + len(hit), whole
            if rng.random() < 0.1:  # they must not travel either: what comes is what leads up to the first bad one
                await s.workers["b"]._stub.Clear(pb.store.KeysRequest())
                came = await s.fetch("b", keys, "a")
                assert (await read_all(s.workers["b"], keys))[False] == 0
                assert len(came.slots) <= min(hit)
            seen = await read_all(author, keys)
            missed += seen[False]
            assert seen[False] <= bad
        assert missed > SLOT_FAULTS / 2
        await s.require_idle()
        await fresh(s, "a", "last-")
        assert s.nodes["a"].numbers()["slots_sealed"] == BLOCKS, "all of the room is there"


async def test_two_hundred_faults_on_the_wire_serve_no_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.kvstore.push_landing.RESETTLE_S", 0.1)
    rng = random.Random(2)
    async with stores(tmp_path, "a", "b", slots=BLOCKS) as s:
        injected, right, missed = 0, 0, 0
        while injected < WIRE_FAULTS:
            keys = await fresh(s, "a", f"w{injected}-")
            await s.workers["b"]._stub.Clear(pb.store.KeysRequest())
            numbers = range(s.network.number() + 1, 1 << 20)  # of the pushes to come
            hit = {kind: frozenset(rng.sample(numbers[:6], 2)) for kind in ("corrupt", "misplace", "stale")}
            s.network.faults = replace(s.network.faults, **hit)
            await s.fetch("b", keys, "a")
            done = s.network.number()
            injected += sum(number < done for kind in hit.values() for number in kind)
            seen = await read_all(s.workers["b"], keys)
            right, missed = right + seen[True], missed + seen[False]
        assert right > missed, "what was damaged on the way came again"
        await s.require_idle()
        assert s.nodes["b"].numbers()["digest_mismatches_landing"] > 0
