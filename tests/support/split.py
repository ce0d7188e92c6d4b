"""The split path in one process: real store nodes, prefill workers and a decode worker, talking gRPC over loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc

from moonpool.core.config import Config
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.placement import Helper, Placement, Segment
from moonpool.core.request import Request
from moonpool.decode_worker.worker import DecodeWorker
from moonpool.engine.device import view_of
from moonpool.engine.engine import Engine, load_engine
from moonpool.engine.host_view import HostView
from moonpool.engine.page_tensor import PageTensor
from moonpool.kvstore.fetching import Moved, PushOrder
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.sealing.keys import kv_keys
from moonpool.prefill_worker.worker import PrefillWorker
from moonpool.wire import channels
from support.workers import Asker, Crowd, Gateway, config_for, generate, idle, member, ref


@dataclass
class Split:
    """Store nodes by node name; prefill workers; one decode worker with its gateway."""

    config: Config
    crowd: Crowd
    stores: dict[str, StoreNode]
    prefills: list[PrefillWorker]
    prefill_members: list[Member]
    prefill_engines: list[Engine]
    decode: DecodeWorker
    decode_member: Member
    decode_engine: Engine
    gateway: Gateway
    asker: Asker

    def place(self, prefill: int = 0, segments: Sequence[Segment] = (), *, ends: Sequence[int] = ()) -> None:
        """Where the next requests go. ``ends``: blocks where spans of prefill workers 0, 1, .. end, before that of the last."""
        helpers = tuple(Helper(ref(self.prefill_members[i]), end) for i, end in enumerate(ends))
        prefill_ref, decode_ref = ref(self.prefill_members[prefill]), ref(self.decode_member)
        self.gateway.placement = Placement(prefill_ref, decode_ref, tuple(segments), helpers=helpers)

    def oracle(self, request: Request) -> list[int]:
        return generate(self.decode_engine, request)

    async def idle(self, seconds: float = 2.0) -> None:
        """Until nobody holds pages, slots or pins; within ``seconds``."""
        await idle(self.decode, seconds)
        deadline = time.monotonic() + seconds
        while any(self.busy().values()):
            assert time.monotonic() < deadline, {name: value for name, value in self.busy().items() if value}
            await asyncio.sleep(0.005)

    def busy(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for i, worker in enumerate(self.prefills):
            numbers = worker.numbers()
            out |= {f"prefill-{i} {name}": numbers[name] for name in ("requests_live", "pages_used", "handoffs")}
        for name, store in self.stores.items():
            numbers = store.numbers()
            wanted = ("landings_open", "tickets", "reservations", "pins", "slots_reserved", "slots_fenced")
            out |= {f"store-{name} {key}": numbers[key] for key in wanted}
        return out

    async def clear_device_pages(self) -> None:
        for worker in (*self.prefills, self.decode):
            await worker.clear_device_pages()


async def _server(stack: AsyncExitStack) -> tuple[grpc.aio.Server, str]:
    server = channels.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0.2)
    return server, f"127.0.0.1:{port}"


async def _push_from(stack: AsyncExitStack, store: StoreNode, config: Config) -> None:
    """Lets ``store`` push blocks to other nodes."""
    keys = kv_keys(config, Path.home())
    key = None if keys is None else keys.current
    pusher = Pusher(store.member, store.layout, store.regions.views, config.transfer, key=key)
    stack.push_async_callback(pusher.close)

    async def push(order: PushOrder) -> Moved:
        drained = await pusher.push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    store.fetcher._push = push


@asynccontextmanager
async def split_path(
    folder: Path,
    model: Path,
    *,
    nodes: tuple[str, ...] = ("a", "a"),
    prefills: int = 1,
    slots: int = 64,
    carrier: str = "auto",
    decode_pages: int | None = None,
    prefill_pages: int | None = None,
    prefill_config: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    security: dict[str, Any] | None = None,
    adapters: dict[str, str] | None = None,
    decode_kind: type[DecodeWorker] = DecodeWorker,
    make_view: Callable[[PageTensor], HostView] = view_of,
    dtype: Literal["bfloat16", "float32"] = "float32",
    **engine: Any,
) -> AsyncIterator[Split]:
    """``nodes``: of the prefill workers (one for each, or one for all), of the decode worker; one store node for each node. No
    prefill worker: role both.

    ``store``, ``security``: values of these sections. ``adapters``: directories by name.
    """
    base = config_for(model, dtype=dtype, **engine)
    base = base.model_copy(update={"model": base.model.model_copy(update={"adapters": adapters or {}})})
    async with AsyncExitStack() as stack:
        probe = load_engine(base, model, threads=1, cache=model)
        layout = probe.layout
        probe.close()
        config = Config.model_validate(
            base.model_dump()
            | {
                "store": {
                    "pool_bytes": slots * layout.slot_bytes,
                    "region_bytes": max(1 << 20, 16 * layout.slot_bytes),
                    "directory": str(folder),
                    **(store or {}),
                },
                "transfer": {"carrier": carrier},
                "security": security or {},
                "timing": base.timing.model_dump() | {"heartbeat_ms": 50, "silent_after_ms": 500, "kill_after_ms": 0},
                "cluster": base.cluster.model_dump() | {"name": folder.name[:40], "state_dir": str(folder)},
            }
        )
        crowd = Crowd()
        stores: dict[str, StoreNode] = {}
        for name in dict.fromkeys(nodes):
            server, address = await _server(stack)
            me = member(f"store-{name}", Role.STORE, layout, node=name, address=address)
            stores[name] = await StoreNode.start(config, me, layout, crowd)
            stack.push_async_callback(stores[name].close)
            if stores[name].fetcher._push is None:
                await _push_from(stack, stores[name], config)
            stores[name].add_to(server)
            crowd.tell(MemberChange(me, Liveness.LIVE))

        async def worker(
            kind: Any, name: str, role: Role, node: str, pages: int | None, settings: Config
        ) -> tuple[Any, Member, Engine]:
            loaded = load_engine(settings, model, threads=1, pages=pages, cache=model, make_view=make_view)
            server, address = await _server(stack)
            me = member(name, role, layout, node=node, address=address)
            started = await kind.start(settings, loaded, me, crowd)
            stack.push_async_callback(started.close)
            started.add_to(server)
            crowd.tell(MemberChange(me, Liveness.LIVE))
            return started, me, loaded

        settings = config.model_copy(update={"engine": config.engine.model_copy(update=prefill_config or {})})
        homes = nodes[:-1] if len(nodes) > 2 else (nodes[0],) * prefills
        made = [
            await worker(PrefillWorker, f"prefill-{i}", Role.PREFILL, homes[i], prefill_pages, settings)
            for i in range(prefills)
        ]
        decode, decode_member, decode_engine = await worker(
            decode_kind, "decode-0", Role.DECODE if prefills else Role.BOTH, nodes[-1], decode_pages, config
        )
        gateway = Gateway(decode, Placement(ref(made[0][1] if made else decode_member), ref(decode_member)))
        stack.push_async_callback(gateway.close)
        yield Split(
            config,
            crowd,
            stores,
            [m[0] for m in made],
            [m[1] for m in made],
            [m[2] for m in made],
            decode,
            decode_member,
            decode_engine,
            gateway,
            Asker(config, layout),
        )
