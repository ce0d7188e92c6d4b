"""The conductor beside real workers on a tiny model: it learns from their reports, and what it predicts comes true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.split import Split, split_path
from support.workers import Answer, member

from moonpool.cluster.conductor import ConductorService
from moonpool.core.config import SchedulerConfig
from moonpool.core.errors import Reason
from moonpool.core.ids import Role
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal, Source
from moonpool.core.request import Request, Targets
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

BLOCK = 16


class NoCall:
    """In place of a gRPC context: none of these calls is refused, and nobody shows a certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


@dataclass
class Served:
    split: Split
    service: ConductorService

    async def report(self) -> None:
        """What the reporter of every worker's process does."""
        for worker in (*self.split.prefills, self.split.decode):
            await self.service.Report(to_wire(worker.report(), pb.types.WorkerReport()), NoCall())  # type: ignore[arg-type]

    def place(self, request: Request, attempt: int = 1, targets: Targets | None = None) -> Placement | Refusal:
        asked = PlaceRequest(request.id, attempt, request.keys, len(request.prompt), 8, targets or Targets())
        return self.service.conductor.place(asked, asyncio.get_running_loop().time())

    def begin(self, request: Request) -> tuple[Placement, Answer]:
        placement = self.place(request)
        assert isinstance(placement, Placement), placement
        self.split.gateway.placement = placement
        return placement, self.split.gateway.begin(request)

    async def ask(self, request: Request) -> tuple[Placement, Answer]:
        placement, answer = self.begin(request)
        await answer.over.wait()
        assert answer.error is None
        done = Finished(request.id, 1, placement.booking, 1.0, 1.0, len(answer.ids), answer.cached_tokens)
        self.service.conductor.finished(done, asyncio.get_running_loop().time())
        await self.split.idle()
        await self.report()
        return placement, answer

    def request(self, length: int, seed: int) -> Request:
        return self.split.asker.request(random.Random(seed).choices(range(128), k=length))

    def pooled(self, request: Request) -> bool:
        """All its blocks are known to lie in the pool of node a."""
        view = self.service.conductor._view
        return not request.keys or [depth for depth, _ in view.pool.match(request.keys)] == [len(request.keys)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Store events arrive by themselves."""
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path, tiny_model: Path) -> Serve:
    @asynccontextmanager
    async def serve(prefills: int) -> AsyncIterator[Served]:
        async with split_path(tmp_path, tiny_model, prefills=prefills, carrier="segment") as split:
            me = member("conductor-0", Role.CONDUCTOR, None)
            at_once = SchedulerConfig(policy="pooled_min_ttft", admission="certain")  # nobody waits in the conductor's queue
            config = split.config.model_copy(update={"scheduler": at_once})
            service = await ConductorService.start(config, me, split.crowd)
            served = Served(split, service)
            await served.report()
            yield served
            await service.close()

    return serve


def predicted_cached(served: Served, request: Request) -> int:
    told = served.service.conductor.explain(request.id)
    assert told is not None
    return int(told["decisions"][-1]["predicted"]["cached_tokens"])


@pytest.mark.parametrize("prefills", [1, 2])
async def test_predicted_cache_hits_are_the_hits_of_the_answers(serve: Serve, prefills: int) -> None:
    async with serve(prefills=prefills) as served:
        for i, length in enumerate((15, 16, 40, 100, 160)):
            request = served.request(length, seed=i)
            _, cold = await served.ask(request)
            assert predicted_cached(served, request) == cold.cached_tokens == 0
            await served.until(lambda asked=request: served.pooled(asked))
            again = served.request(length, seed=i)
            placement, warm = await served.ask(again)
            assert predicted_cached(served, again) == warm.cached_tokens == min(length // BLOCK * BLOCK, length - 1)
            assert warm.ids == cold.ids
            if length >= BLOCK:
                assert placement.segments[0].source in (Source.REUSE, Source.FETCH)[:prefills]
        numbers = served.service.numbers()
        assert numbers["cached_tokens_predicted"] == numbers["cached_tokens_actual"] > 0
        assert numbers["bookings"] == numbers["attempts_reported"] == 0


async def test_blocks_gone_from_device_pages_are_fetched_from_the_pool(serve: Serve) -> None:
    async with serve(prefills=1) as served:
        _, cold = await served.ask(first := served.request(100, seed=1))
        await served.until(lambda: served.pooled(first))
        await served.split.clear_device_pages()
        await served.report()
        placement, warm = await served.ask(again := served.request(100, seed=1))
        assert [(s.source, s.first, s.count, s.node) for s in placement.segments] == [(Source.FETCH, 0, 6, "a")]
        assert predicted_cached(served, again) == warm.cached_tokens == 96
        assert warm.ids == cold.ids


async def test_a_ttft_target_is_refused_under_load_and_accepted_when_idle(serve: Serve) -> None:
    async with serve(prefills=1) as served:
        for i in range(12):
            await served.ask(served.request((80, 320, 640)[i % 3], seed=i))
        idle = served.place(probe := served.request(640, seed=50))
        assert isinstance(idle, Placement)
        assert idle.predicted_ttft_ms > 0
        told = served.service.conductor.explain(probe.id)
        assert told is not None
        target = Targets(ttft_ms=4 * told["decisions"][0]["predicted"]["ttft_high_ms"])
        served.service.conductor.finished(Finished(probe.id, 1, 0), asyncio.get_running_loop().time())
        crowd = [served.request(640, seed=100 + i) for i in range(10)]
        answers = [served.begin(request)[1] for request in crowd]
        refusal = served.place(asked := served.request(640, seed=60), targets=target)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.TARGETS_MISSED
        assert refusal.retry_after_s > 0
        for request, answer in zip(crowd, answers, strict=True):
            await answer.over.wait()
            served.service.conductor.finished(Finished(request.id, 1, 0), asyncio.get_running_loop().time())
        await served.split.idle()
        await served.report()
        assert isinstance(served.place(asked, attempt=2, targets=target), Placement)
