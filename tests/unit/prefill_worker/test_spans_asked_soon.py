"""A job that waits has the worker before it begin: what that sends lies in the pool until there are pages for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.groups import SIZE, Halt, answered, count, group, ids
from support.split import Split
from support.store import until
from support.workers import Answer

from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.request import Request
from moonpool.engine.pages import OutOfPages

PROMPT = ids(20 * SIZE + 5, 7)
END = 12


class Busy:
    """Worker 1 stands in another prompt while a group's prompt waits there; worker 0 has sent what lies before its span."""

    def __init__(self, split: Split, halt: Halt) -> None:
        self.split, self.halt = split, halt
        self.request: Request
        self.answer: Answer

    async def begin(self, seed: int) -> Answer:
        """Of the prompt that worker 1 stands in."""
        split = self.split
        self.halt.arm()
        split.place(1)
        other = split.gateway.begin(split.asker.request(ids(3 * SIZE, 100 + seed)))
        await until(self.halt.there.is_set, "the other prompt never came to its last layer")
        split.place(1, ends=[END])
        jobs = count(split, 0, "jobs")
        self.request = split.asker.request(PROMPT)
        self.answer = split.gateway.begin(self.request)
        await until(lambda: count(split, 0, "jobs") == jobs + 1 and not split.prefills[0].held(), "the first is not through")
        assert split.stores["b"].numbers()["landings_open"] == 1
        assert split.prefills[1].numbers()["requests_waiting"] == 1
        return other

    async def let_go(self) -> None:
        await until(lambda: coming(self.split) == 0, "slots are held for what nobody waits for")


def coming(split: Split) -> float:
    """Landings and hand-offs of worker 1."""
    return split.stores["b"].numbers()["landings_open"] + len(split.prefills[1]._handoffs)


@asynccontextmanager
async def behind(busy: Busy, seed: int) -> AsyncIterator[None]:
    """Within it the job waits; after it everything is over and idle."""
    other = await busy.begin(seed)
    yield
    busy.halt.go()
    for answer in (other, busy.answer):
        await asyncio.wait_for(answer.over.wait(), 10)
    assert other.error is None
    await busy.split.idle(5.0)
    await busy.split.clear_device_pages()
    for store in busy.split.stores.values():
        store.pool.clear()


async def test_who_is_free_first_begins_and_what_it_sends_waits_in_the_pool(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(tmp_path, tiny_model) as split:
        busy = Busy(split, Halt(split.prefill_engines[1]))
        worker = split.prefills[1]

        async def done(name: str, *, jobs: int, sent: int, alone: int = 0) -> None:
            assert busy.answer.error is None, f"{name}: {busy.answer.error}"
            assert busy.answer.ids == split.oracle(busy.request), name
            assert (count(split, 0, "jobs"), count(split, 1, "span_tokens"), count(split, 1, "spans_alone")) == (
                jobs,
                sent * SIZE,
                alone,
            ), name

        async with behind(busy, 1):
            pass
        await done("it waits", jobs=1, sent=END)

        async with behind(busy, 2):
            split.decode.cancel(split.gateway.stream, busy.request.id, 1)
            await busy.let_go()
        assert (count(split, 0, "jobs"), count(split, 1, "span_tokens")) == (2, END * SIZE)

        pages, refused = worker._engine.pages, [True]
        allocate = pages.allocate

        def full(n: int) -> list[int]:
            if n == 21 and refused and refused.pop():
                raise OutOfPages("as if")
            return allocate(n)

        monkeypatch.setattr(pages, "allocate", full)
        async with behind(busy, 3):
            pass
        await done("there is no room when its turn comes: what has landed is found in the pool", jobs=3, sent=END)
        assert not refused and count(split, 1, "skips") == 1 and count(split, 1, "prefix_tokens_pool") == END * SIZE

        async with behind(busy, 4):
            split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.GONE, "killed"))
            await busy.let_go()
        await done("the first one is gone, what it sent is here", jobs=4, sent=END)
        assert count(split, 1, "prefix_tokens_pool") == 2 * END * SIZE
        split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.LIVE))


async def test_what_the_waiting_worker_has_itself_is_not_sent_and_sent_after_all_where_it_lost_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with group(tmp_path, tiny_model) as split:
        busy = Busy(split, Halt(split.prefill_engines[1]))
        busy.halt.go()
        lost: Callable[[], Awaitable[object]] = split.prefills[1].clear_device_pages
        for sent, forget in ((6, None), (END, lost)):
            before = count(split, 1, "span_tokens")
            split.place(1)
            await answered(split, split.asker.request(PROMPT[: 6 * SIZE]))
            await split.decode.clear_device_pages()
            for node in "abc":
                split.stores[node].pool.clear()
            async with behind(busy, 10 + sent):
                if forget is not None:
                    await forget()
                    assert coming(split) > 0
            assert busy.answer.ids == split.oracle(busy.request)
            assert count(split, 1, "span_tokens") - before == sent * SIZE
