from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import pytest
from aiohttp import web
from support.openai_server import Body, Script, answer_at_once, event, open_stream, prompt_tokens, serving, text, usage

from moonpool.core.request import Targets
from moonpool.loadgen.client import Answer, HttpSender, open_session
from moonpool.loadgen.clock import MonotonicClock
from moonpool.loadgen.plan import Plan, Scaling, plan_sends
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.record import Outcome
from moonpool.loadgen.replay import Replay, RequestShape
from moonpool.loadgen.summary import RunFacts, summarise
from moonpool.loadgen.trace import Trace, TraceRow

BUSY_MS = 250.0  # what a loaded machine may add to any one instant


def plan_of(*timestamps: float, tokens: int = 700, output: int = 3) -> Plan:
    rows = tuple(TraceRow(t, tokens, output, (i, i + 1_000), i + 1) for i, t in enumerate(timestamps))
    return plan_sends(Trace(rows, 512), Scaling(block_tokens=16))


def shape(targets: Targets | None = None, *, send_targets: bool = True) -> RequestShape:
    return RequestShape("tiny", "run", targets or Targets(), send_targets)


async def replayed(
    url: str,
    plan: Plan,
    *,
    cap: int = 0,
    timeout_s: float = 30,
    made: RequestShape | None = None,
    started: list[Replay] | None = None,
) -> Replay:
    clock = MonotonicClock()
    async with open_session(url, timeout_s=timeout_s) as session:
        run = Replay(plan, PromptMaker(token_alphabet()), HttpSender(session, clock), made or shape(), clock, cap=cap)
        if started is not None:
            started.append(run)
        await run.run()
    return run


async def test_the_first_real_text_is_the_first_token() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = await open_stream(request)
        began = asyncio.get_running_loop().time()

        async def at(seconds: float, data: bytes) -> None:
            await asyncio.sleep(began + seconds - asyncio.get_running_loop().time())
            await response.write(data)

        await at(0.005, event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}))
        await at(0.020, b": keep-alive\n\n")
        await at(0.050, event({"choices": [{"delta": {"content": ""}, "finish_reason": None}]}))
        await at(0.120, b": keep-alive\n\n")
        await at(0.200, event({"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]}))
        await at(0.240, event({"choices": [{"delta": {"content": "!"}, "finish_reason": "length"}]}) + event("[DONE]"))
        return response

    async with serving(script) as (url, _):
        run = await replayed(url, plan_of(0))
    (record,) = run.records
    assert record.outcome is Outcome.OK
    assert record.ttft_ms is not None
    assert 195 <= record.ttft_ms <= 200 + BUSY_MS
    assert len(record.gaps_ms) == 1
    assert record.gaps_ms[0] < record.ttft_ms


class Frozen:
    """Answers at once until ``freeze_at`` requests came, then none until ``thaw``; ``crowd`` is set when that many came."""

    def __init__(self, freeze_at: int, crowd: int) -> None:
        self.arrived = 0
        self._freeze_at = freeze_at
        self._crowd = crowd
        self.crowd = asyncio.Event()
        self.thaw = asyncio.Event()

    async def __call__(self, request: web.Request, body: Body) -> web.StreamResponse:
        self.arrived += 1
        if self.arrived == self._crowd:
            self.crowd.set()
        if self.arrived > self._freeze_at:
            await self.thaw.wait()
        return await answer_at_once(request, body)


async def test_sends_keep_to_the_plan_while_the_server_is_frozen() -> None:
    script = Frozen(10, crowd=40)
    async with serving(script) as (url, _):
        task = asyncio.create_task(replayed(url, plan_of(*range(0, 800, 20))))
        await asyncio.wait_for(script.crowd.wait(), 60)  # all came although none of the last 30 is answered
        script.thaw.set()
        run = await task
    assert [r.outcome for r in run.records] == [Outcome.OK] * 40
    lags = sorted(r.lag_ms or 0 for r in run.records)
    assert lags[len(lags) // 2] <= 20
    frozen_longest = run.records[10]
    assert (frozen_longest.ttft_ms or 0) >= 500
    summary = summarise(run.records, RunFacts(40, 0.78, Targets()))
    assert summary.held_back == 0


async def test_a_cap_holds_back_requests_counts_them_and_shows_in_the_schedule_latency() -> None:
    script = Frozen(0, crowd=4)
    async with serving(script) as (url, _):
        started: list[Replay] = []
        task = asyncio.create_task(replayed(url, plan_of(*[0] * 40), cap=4, started=started))
        await asyncio.wait_for(script.crowd.wait(), 60)
        progress = started[0].progress
        assert (script.arrived, progress.sent, progress.in_flight, progress.held_back) == (4, 40, 4, 36)
        await asyncio.sleep(0.05)  # a freeze that is longer than any lag allowed
        script.thaw.set()
        run = await task
    assert [r.outcome for r in run.records] == [Outcome.OK] * 40
    held = [r for r in run.records if r.cap_wait_ms > 0]
    assert len(held) == run.progress.held_back == 36
    worst = max(held, key=lambda r: r.cap_wait_ms)
    assert (worst.lag_ms or 0) >= worst.cap_wait_ms - 1
    assert (worst.schedule_ttft_ms or 0) - (worst.ttft_ms or 0) == pytest.approx(worst.lag_ms)
    facts = RunFacts(40, 0.0, Targets(), cap=4, held_back=run.progress.held_back, most_in_flight=run.progress.most_in_flight)
    summary = summarise(run.records, facts)
    assert summary.lag is not None
    assert summary.lag.behind
    assert (summary.held_back, summary.most_in_flight) == (len(held), 4)
    assert summary.longest_cap_wait_ms == worst.cap_wait_ms


async def test_rows_of_one_timestamp_are_all_in_flight_at_once_without_a_cap() -> None:
    together = asyncio.Barrier(81)

    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        await together.wait()
        return await answer_at_once(request, body)

    async with serving(script) as (url, seen):
        run = await asyncio.wait_for(replayed(url, plan_of(*[0] * 50, 1, *[1] * 30)), 60)
    assert len(seen.bodies) == len(run.records) == 81
    assert all(r.outcome is Outcome.OK for r in run.records)
    assert [r.row for r in run.records] == list(range(1, 82))


async def test_every_prompt_reaches_the_server_with_its_planned_length() -> None:
    rows = tuple(TraceRow(0, n, 2, tuple(range(-(-n // 512))), n) for n in (1, 511, 512, 513, 1_025, 4_096))
    plan = plan_sends(Trace(rows, 512), Scaling(block_tokens=64))
    async with serving(answer_at_once) as (url, seen):
        run = await replayed(url, plan)
    assert sorted(prompt_tokens(b) for b in seen.bodies) == sorted(s.input_tokens for s in plan.sends)
    assert all(r.prompt_tokens == r.input_tokens for r in run.records)
    assert all(b["ignore_eos"] and b["max_tokens"] == b["min_tokens"] == 2 and b["temperature"] == 0 for b in seen.bodies)


async def test_targets_go_out_as_headers_unless_they_are_to_be_kept_private() -> None:
    wanted = Targets(ttft_ms=4_000, tbt_ms=500.5)
    async with serving(answer_at_once) as (url, seen):
        await replayed(url, plan_of(0), made=shape(wanted))
        await replayed(url, plan_of(0), made=shape(wanted, send_targets=False))
    public, private = seen.headers
    assert (public["x-ttft-target-ms"], public["x-tbt-target-ms"]) == ("4000", "500.5")
    assert "x-ttft-target-ms" not in private
    assert public["x-request-id"] == "run-0"


async def refuse(request: web.Request, body: Body) -> web.StreamResponse:
    error = {"error": {"message": "no placement meets 4000 ms", "code": "targets_missed"}}
    return web.json_response(error, status=429, headers={"Retry-After": "2.5"})


async def no_path(request: web.Request, body: Body) -> web.StreamResponse:
    return web.Response(text="nobody home", status=503, headers={"Retry-After": "soon"})


async def bad_request(request: web.Request, body: Body) -> web.StreamResponse:
    return web.json_response({"error": {"message": "prompt: too long", "code": "context_length_exceeded"}}, status=400)


async def cut_off(request: web.Request, body: Body) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(text(" a"))
    return response


async def fail_midway(request: web.Request, body: Body) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(text(" a") + event({"error": {"message": "the worker died", "code": "peer_silent"}}) + event("[DONE]"))
    return response


async def silent(request: web.Request, body: Body) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(text("") + text("", "length") + usage(prompt_tokens(body), 3) + event("[DONE]"))
    return response


@pytest.mark.parametrize(
    ("script", "outcome", "reason", "retry"),
    [
        (refuse, Outcome.REFUSED, "targets_missed", 2.5),
        (no_path, Outcome.REFUSED, "503 nobody home", None),
        (bad_request, Outcome.FAILED, "400 context_length_exceeded", None),
        (cut_off, Outcome.FAILED, "the stream ended before the answer did", None),
        (fail_midway, Outcome.FAILED, "peer_silent", None),
    ],
)
async def test_what_the_server_does_decides_the_outcome(
    script: Script, outcome: Outcome, reason: str, retry: float | None
) -> None:
    async with serving(script) as (url, _):
        run = await replayed(url, plan_of(0))
    (record,) = run.records
    assert (record.outcome, record.reason, record.retry_after_s) == (outcome, reason, retry)
    assert run.progress.outcomes[outcome] == 1


async def test_an_answer_without_any_text_is_ok_and_marked() -> None:
    async with serving(silent) as (url, _):
        run = await replayed(url, plan_of(0))
    (record,) = run.records
    assert record.outcome is Outcome.OK
    assert record.without_text
    assert record.ttft_ms is not None


async def test_a_server_that_never_answers_times_out_and_one_that_is_not_there_fails() -> None:
    forever = asyncio.Event()

    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        await forever.wait()
        return await answer_at_once(request, body)

    async with serving(script) as (url, _):
        run = await replayed(url, plan_of(0), timeout_s=0.2)
        forever.set()
    assert (run.records[0].outcome, run.records[0].reason) == (Outcome.FAILED, "timed out")
    run = await replayed(url, plan_of(0))
    assert run.records[0].outcome is Outcome.FAILED
    assert "Connect" in run.records[0].reason


async def test_stopping_sends_nothing_more_and_dropping_records_what_was_under_way() -> None:
    script = Frozen(2, crowd=4)
    async with serving(script) as (url, _):
        started: list[Replay] = []
        task = asyncio.create_task(replayed(url, plan_of(0, 1, 2, 3, 3_600_000), started=started))
        await asyncio.wait_for(script.crowd.wait(), 60)
        started[0].stop()
        await asyncio.sleep(0)
        assert not task.done()
        started[0].drop()
        run = await asyncio.wait_for(task, 30)
    assert run.stopped
    assert [r.outcome for r in run.records] == [Outcome.OK, Outcome.OK, Outcome.CANCELLED, Outcome.CANCELLED]
    assert run.progress.in_flight == 0


async def test_an_undisturbed_replay_is_not_called_stopped() -> None:
    async with serving(answer_at_once) as (url, _):
        assert not (await replayed(url, plan_of(0, 1))).stopped


class NullSender:
    """Answers at once, in no time."""

    async def send(self, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        answer.sent = answer.ended = MonotonicClock().now()
        answer.outcome = Outcome.OK


async def test_five_thousand_rows_a_millisecond_apart_stay_on_plan_with_records_and_all() -> None:
    plan = plan_of(*range(5_000), tokens=20)
    clock = MonotonicClock()
    for attempt in itertools.count(1):
        run = Replay(plan, PromptMaker(token_alphabet()), NullSender(), shape(), clock)
        await run.run()
        summary = summarise(run.records, RunFacts(5_000, plan.span_s, Targets()))
        assert summary.lag is not None
        assert sum(summary.lag.histogram) == summary.ok == 5_000
        if summary.lag.last_ms <= 20:
            return
        assert attempt < 3, f"the last send was {summary.lag.last_ms} ms late three times"


class BrokenSender:
    async def send(self, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        raise RuntimeError("a bug of ours")


async def test_a_bug_in_the_client_ends_the_replay_instead_of_hiding() -> None:
    run = Replay(plan_of(0, 3_600_000), PromptMaker(token_alphabet()), BrokenSender(), shape(), MonotonicClock())
    with pytest.raises(RuntimeError, match="a bug of ours"):
        await run.run()
