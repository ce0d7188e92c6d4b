"""One gateway's token stream: messages per step, and a bound for slow readers."""

from __future__ import annotations

import asyncio

from moonpool.core.ids import RequestId
from moonpool.core.request import Emission, Sampled
from moonpool.decode_worker import stream
from moonpool.decode_worker.stream import TokenStream


def emission(position: int) -> Emission:
    return Emission(RequestId("r"), 1, position, Sampled(position))


async def test_what_one_step_emits_travels_in_one_message() -> None:
    out = TokenStream()
    taking = asyncio.create_task(out.take())
    await asyncio.sleep(0)
    out.put(emission(0))
    out.put(emission(1))
    assert [e.position for e in await taking] == [0, 1]
    out.put(emission(2))
    assert [e.position for e in await out.take()] == [2]


async def test_a_closed_stream_gives_what_is_left_and_then_nothing() -> None:
    out = TokenStream()
    out.put(emission(0))
    out.close()
    out.put(emission(1))
    assert [e.position for e in await out.take()] == [0]
    assert await out.take() == []
    assert await out.take() == []


async def test_a_reader_too_far_behind_loses_the_stream() -> None:
    out = TokenStream()
    for position in range(stream.MAX_PENDING + 5):
        out.put(emission(position))
    assert out.overflowed
    assert await out.take() == []
