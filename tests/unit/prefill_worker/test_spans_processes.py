"""The process of the worker before is stopped, and killed, amid its span."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.groups import SIZE, check, count, group, ids
from support.prefill_process import prefill_process
from support.store import until
from support.workers import member, ref

from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Helper, Placement
from moonpool.prefill_worker import pace


async def test_a_process_struck_amid_its_span_costs_no_attempt(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SPAN_FLOOR_S", 0.5)
    async with group(tmp_path, tiny_model, 1) as split, AsyncExitStack() as stack:
        peers = [split.prefill_members[0], *(store.member for store in split.stores.values())]
        names = [member(f"prefill-{i}", Role.PREFILL, split.decode_engine.layout, node="z") for i in (8, 9)]
        starting = (stack.enter_async_context(prefill_process(tmp_path, split.config, me, peers)) for me in names)
        helpers = await asyncio.gather(*starting)
        for number, ((pid, helper), strike) in enumerate(zip(helpers, (signal.SIGSTOP, signal.SIGKILL), strict=True)):
            split.crowd.tell(MemberChange(helper, Liveness.LIVE))
            last, decode = ref(split.prefill_members[0]), ref(split.decode_member)
            split.gateway.placement = Placement(last, decode, helpers=(Helper(ref(helper), 12),))
            request = split.asker.request(ids(20 * SIZE + 5, number))
            answer = split.gateway.begin(request)
            await until(lambda: any(w.span is not None and w.span.came for w in split.prefills[0]._jobs.values()), "it began")
            os.kill(pid, strike)
            await asyncio.wait_for(answer.over.wait(), 10)
            assert answer.error is None
            check(split, request, answer)
            assert (count(split, 0, "spans_alone"), count(split, 0, "span_tokens")) == (number + 1, 0)
            split.crowd.tell(MemberChange(helper, Liveness.GONE, "killed"))  # what it may still write is no longer kept for it
            await split.idle()
