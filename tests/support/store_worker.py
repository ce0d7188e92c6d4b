"""A worker process for tests of the store node: python -m support.store_worker ADDRESS NODE ID INCARNATION WHAT.

It opens a session, does WHAT, prints one line and then does as it is told on standard input until that closes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter

import numpy as np

from moonpool.core.config import TimingConfig
from moonpool.core.errors import DigestMismatch
from moonpool.core.ids import Role
from moonpool.core.landing import Ticket
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb
from support.store import LAYOUT, MappedWriter, block_bytes, block_keys, member


def read_until(stop: threading.Event, client: WorkerStore, ticket: Ticket, seen: Counter[str]) -> None:
    """In small steps, so that being frozen mostly strikes in the middle of a slice."""
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
                    right = (into == slices.slice_of(LAYOUT, content[slot.key], 0, layer)).all()
                    seen["right" if right else "wrong"] += 1


async def main(address: str, node: str, id: str, incarnation: int, what: str) -> None:
    me = member(id, Role.PREFILL, node, incarnation=incarnation)
    client = await WorkerStore.connect(
        address,
        me,
        LAYOUT,
        on_landed=lambda _: None,
        on_failed=lambda _: None,
        on_lost=lambda: print("lost", flush=True),
        timing=TimingConfig(heartbeat_ms=50),
    )
    writer = MappedWriter(address, me)
    await writer.open()
    if what == "land":  # the first layer of three blocks, then nothing more
        landing = await writer.grant("r1", block_keys("p", 3), reader="decode-0", reader_incarnation=1)
        await writer.push(landing, layers=[0])
    elif what == "reserve":
        await client._stub.Reserve(pb.store.KeysRequest(session=client._number, keys=block_keys("k", 4)))
    elif what == "read":  # what another worker published, again and again, also after it has been frozen
        ticket = await client.pin(block_keys("k", 4))
        seen, stop = Counter[str](), threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(read_until, stop, client, ticket, seen))
    elif what == "pin":
        await client.publish([(key, block_bytes(key)) for key in block_keys("k", 2)])
        await client.pin(block_keys("k", 2))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if what == "read":
        stop.set()
        await reading
        print(" ".join(f"{name}={seen[name]}" for name in ("right", "miss", "wrong")), flush=True)
    await writer.close()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5]))
