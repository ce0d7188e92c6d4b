"""A reader that goes on reading after its ticket is gone, while its slots are given to others."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, store_node, worker

from moonpool.core.errors import DigestMismatch
from moonpool.core.landing import Ticket
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore


def read_until(stop: threading.Event, client: WorkerStore, ticket: Ticket) -> Counter[str]:
    """Read everything the ticket names, again and again. Wrong bytes raise AssertionError."""
    seen: Counter[str] = Counter()
    into = np.empty(LAYOUT.slice_bytes, np.uint8)
    content = {slot.key: block_bytes(slot.key) for slot in ticket.slots}
    while not stop.is_set():
        for slot in ticket.slots:
            for layer in range(LAYOUT.layers):
                try:
                    client.read_slice(slot, layer, into, LAYOUT.block_tokens)
                except DigestMismatch:
                    seen["miss"] += 1
                else:
                    assert (into == slices.slice_of(LAYOUT, content[slot.key], 0, layer)).all()
                    seen["right"] += 1
    return seen


@pytest.mark.parametrize("poison", [False, True])
async def test_a_read_that_outlives_its_ticket_is_right_or_a_miss_and_never_wrong(tmp_path: Path, poison: bool) -> None:
    settings = config(tmp_path, slots=4, engine={"poison": poison}, timing={"silent_after_ms": 10_000})  # the reader is busy
    async with store_node(settings, Roll()) as node, worker(node) as (reader, _), worker(node, "decode-1") as (other, _):
        keys = block_keys("k", 4)
        await other.publish([(key, block_bytes(key)) for key in keys])
        ticket = await reader.pin(keys)
        stop = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(read_until, stop, reader, ticket))
        try:
            assert await other.publish([(key, block_bytes(key)) for key in block_keys("x", 4)]) == 0, "all pinned"
            for session in node.sessions:
                if session.life.member == "decode-0":
                    node.sessions.end(session, "the reader fell silent")
            for i in range(40):
                fresh = block_keys(f"n{i}-", 4)
                assert await other.publish([(key, block_bytes(key)) for key in fresh]) == 4
        finally:
            stop.set()
        seen = await reading
        assert seen["miss"] > 0
        assert seen["right"] > 0
