"""The store node that survives the kills of ``crash_moves``: a forked process that serves, and looks at itself when asked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import MIB, Config
from moonpool.core.errors import DigestMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.node import StoreNode
from moonpool.wire import channels

LAYOUT = KVLayout("c0" * 16, layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=64)  # 256 KiB blocks
BATCH = 16
SLOTS = 4 * BATCH
SETTLE_S = 10.0  # after this, what is not free counts as lost
CLAIMS = ("slots_reserved", "slots_fenced", "landings_open", "reservations", "pins")


def key(n: int) -> bytes:
    return hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest()


def content(of: bytes) -> NDArray[np.uint8]:
    """[block_bytes] that follow from the key alone."""
    words = np.random.default_rng(int.from_bytes(of, "little")).integers(0, 1 << 63, 512, dtype=np.int64)
    return np.resize(words.view(np.uint8), LAYOUT.block_bytes)


def member(id: str, role: Role, node: str, address: str = "", incarnation: int = 0) -> Member:
    life = Incarnation(incarnation or time.time_ns())
    return Member(MemberId(id), role, NodeId(node), life, address, os.getpid(), LAYOUT)


def config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "store": {"pool_bytes": SLOTS * LAYOUT.slot_bytes, "region_bytes": 64 * MIB, "directory": str(folder)},
            "cluster": {"name": "crash", "state_dir": str(folder)},
            "transfer": {"carrier": "tcp"},
        }
    )


class Roll:
    """core.membership.Peers as it is told."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._known = {one.id: MemberChange(one, Liveness.LIVE) for one in members}
        self._listeners: list[Callable[[MemberChange], None]] = []

    def say(self, change: MemberChange) -> None:
        self._known[change.member.id] = change
        for listener in self._listeners:
            listener(change)

    def get(self, member: MemberId) -> MemberChange | None:
        return self._known.get(member)

    def live(self, role: Role) -> list[Member]:
        return [c.member for c in self._known.values() if c.liveness is Liveness.LIVE and c.member.role is role]

    def store_of(self, node: NodeId) -> Member | None:
        return next((one for one in self.live(Role.STORE) if one.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)


class House:
    """The parent's end. ``store`` is the node's member. The process ends when this object is closed."""

    def __init__(self, node: str, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _inside(node, folder, theirs)
        theirs.close()
        self._file = ours.makefile("rw")
        ours.close()
        told = json.loads(self._file.readline())
        self.store = member(f"store-{node}", Role.STORE, node, told["address"], told["incarnation"])

    def ask(self, **command: Any) -> dict[str, Any]:
        self._file.write(json.dumps(command) + "\n")
        self._file.flush()
        answer: dict[str, Any] = json.loads(self._file.readline())
        return answer

    def close(self) -> None:
        self._file.close()
        os.waitpid(self._pid, 0)


def _inside(node: str, folder: Path, line: socket.socket) -> None:
    """Never returns into the parent's stack."""
    try:
        os.dup2(2, 1)  # what the node logs is no figure
        asyncio.run(_serve(node, folder, line))
        os._exit(0)
    except BaseException:  # noqa: BLE001  whatever it is, a forked child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(1)


async def _serve(node: str, folder: Path, line: socket.socket) -> None:
    server, roll = channels.server(), Roll()
    address = f"127.0.0.1:{channels.bind(server, '127.0.0.1:0')}"
    me = member(f"store-{node}", Role.STORE, node, address)
    store = await StoreNode.start(config(folder), me, LAYOUT, roll)
    store.add_to(server)
    await server.start()
    client = await WorkerStore.connect(
        address, member("looker", Role.DECODE, node), LAYOUT, on_landed=_heed, on_failed=_heed, on_lost=lambda: None
    )
    reader, writer = await asyncio.open_connection(sock=line)
    writer.write(json.dumps({"address": address, "incarnation": me.incarnation}).encode() + b"\n")
    asked = _Asked(store, roll, client)
    while command := await reader.readline():
        given = json.loads(command)
        answer = await getattr(asked, given.pop("do"))(**given)
        writer.write(json.dumps(answer).encode() + b"\n")
    writer.close()
    await client.close()
    await store.close()
    await server.stop(0.2)


def _heed(_: object) -> None:
    pass


class _Asked:
    def __init__(self, store: StoreNode, roll: Roll, client: WorkerStore) -> None:
        self._store, self._roll, self._client = store, roll, client

    async def fill(self) -> dict[str, Any]:
        stored = await self._client.publish([(key(n), content(key(n))) for n in range(BATCH)])
        return {"stored": stored}

    async def gone(self, id: str, incarnation: int, node: str) -> dict[str, Any]:
        """As the registry says it when the agent of that node has proved the death."""
        dead = member(id, Role.PREFILL, node, incarnation=incarnation)
        self._roll.say(MemberChange(dead, Liveness.GONE, "its process ended (pidfd)"))
        return {}

    async def look(self, low: int, high: int) -> dict[str, Any]:
        """Blocks ``low`` to ``high`` must be here. What is here must be right, and nothing may be held."""
        faults, end = [], time.monotonic() + SETTLE_S
        while (held := self._held()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if held:
            faults.append(f"still held after {SETTLE_S:g} s: {held}")
        keys = list(self._store.pool.held.index.keys())
        seen = Counter[bool | None]()
        for one in keys:
            ticket = await self._client.pin([one])
            seen.update(is_right(self._client, slot) for slot in ticket.slots)
            await self._client.unpin(ticket)
        if seen[False]:
            faults.append(f"{seen[False]} blocks with wrong bytes")
        if seen[None]:  # a reader is safe from them, but somebody wrote into a slot that was no longer its own
            faults.append(f"{seen[None]} findable blocks that differ from their digests")
        missing = sum(key(n) not in keys for n in range(low, high))
        if missing:
            faults.append(f"{missing} of {high - low} blocks that were stored are not found")
        return {"found": seen[True], "faults": faults}

    def _held(self) -> dict[str, float]:
        numbers = self._store.numbers()
        return {name: numbers[name] for name in CLAIMS if numbers[name]}


def is_right(reader: WorkerStore, slot: SlotRef) -> bool | None:
    """None: a miss, because the reader's digest check says so."""
    copy, expected = np.empty(LAYOUT.slice_bytes, np.uint8), content(slot.key)
    for layer in range(LAYOUT.layers):
        try:
            reader.read_slice(slot, layer, copy, LAYOUT.block_tokens)
        except DigestMismatch:
            return None
        if not np.array_equal(copy, slices.slice_of(LAYOUT, expected, 0, layer)):
            return False
    return True
