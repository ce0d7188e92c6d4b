"""An open-loop replay: sends keep to the plan whatever the server does."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field

from moonpool.core.request import Targets
from moonpool.loadgen.client import Answer, Sender
from moonpool.loadgen.clock import Clock
from moonpool.loadgen.plan import Plan, PlannedSend
from moonpool.loadgen.prompts import PromptMaker
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.schedule import drive

_RECENT = 500  # finished requests that the live view looks at
_START_S = 0.05  # until the first send: the scheduler task is then certainly running


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What every request of a replay has in common."""

    model: str
    run_id: str  # names requests: <run_id>-<index>
    targets: Targets = field(default_factory=Targets)
    send_targets: bool = True  # in headers, so that the server may refuse what it cannot serve in time


@dataclass(slots=True)
class Progress:
    """Counts while the replay runs; ``recent`` are the last finished requests."""

    planned: int = 0
    sent: int = 0
    in_flight: int = 0
    held_back: int = 0
    most_in_flight: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    met: int = 0
    recent: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Replay:
    """One run of a plan. ``records`` holds every request that was begun, in order of the plan.

    ``cap`` bounds the requests in flight (0: none). A request held back by it is counted and keeps its planned time, so
    the wait shows in its lag and its schedule latencies.
    """

    def __init__(
        self, plan: Plan, prompts: PromptMaker, sender: Sender, shape: RequestShape, clock: Clock, *, cap: int = 0
    ) -> None:
        self._plan = plan
        self._prompts = prompts
        self._sender = sender
        self._shape = shape
        self._clock = clock
        self._slots = asyncio.Semaphore(cap) if cap else None
        self._ready: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduler: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self.records: list[RequestRecord] = []
        self.progress = Progress(planned=len(plan.sends))
        self.start = 0.0  # on the clock; planned times count from here
        self.stopped = False

    async def run(self) -> None:
        """Send everything and wait for the answers. After ``stop`` it returns early, with what there is."""
        self.start = self._clock.now() + _START_S
        at = [s.at_s for s in self._plan.sends]
        self._scheduler = asyncio.create_task(
            drive(at, self._send, self._clock, start=self.start, prepare=self._prepare), name="replay scheduler"
        )
        try:
            await asyncio.wait([self._scheduler])
            if not self._scheduler.cancelled():
                self._scheduler.result()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.stop()
            self.drop()
            while self._tasks:
                await asyncio.wait(self._tasks)
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Send nothing more; answers under way may still end."""
        if self._scheduler is not None and self._scheduler.cancel():
            self.stopped = True

    def drop(self) -> None:
        """Give up the answers under way; they are recorded as cancelled."""
        self.stopped = self.stopped or bool(self._tasks)
        for task in self._tasks:
            task.cancel()

    def _prepare(self, index: int) -> None:
        self._ready[index] = self._body(self._plan.sends[index])

    def _send(self, index: int) -> None:
        send = self._plan.sends[index]
        record = RequestRecord(
            index=index,
            row=send.row,
            loop=send.loop,
            request_id=f"{self._shape.run_id}-{index}",
            planned_s=send.at_s,
            input_tokens=send.input_tokens,
            output_tokens=send.output_tokens,
            targets=self._shape.targets,
        )
        self.records.append(record)
        body = self._ready.pop(index, None) or self._body(send)
        self.progress.sent += 1
        answer = Answer()
        task = asyncio.create_task(self._one(record, body, answer))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, record, answer))

    async def _one(self, record: RequestRecord, body: bytes, answer: Answer) -> None:
        if self._slots is None:
            await self._on_the_wire(record, body, answer)
            return
        await self._take_slot(self._slots, record)
        try:
            await self._on_the_wire(record, body, answer)
        finally:
            self._slots.release()

    async def _on_the_wire(self, record: RequestRecord, body: bytes, answer: Answer) -> None:
        progress = self.progress
        progress.in_flight += 1
        progress.most_in_flight = max(progress.most_in_flight, progress.in_flight)
        try:
            await self._sender.send(body, self._headers(record), answer)
        finally:
            progress.in_flight -= 1

    def _ended(self, task: asyncio.Task[None], record: RequestRecord, answer: Answer) -> None:
        """Runs for every task, also one cancelled before its first step. A bug of ours ends the replay."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = self._fault or fault
            self.stop()
        self._note(record, answer)

    async def _take_slot(self, slots: asyncio.Semaphore, record: RequestRecord) -> None:
        if not slots.locked():
            await slots.acquire()
            return
        self.progress.held_back += 1
        began = self._clock.now()
        await slots.acquire()
        record.cap_wait_ms = (self._clock.now() - began) * 1e3

    def _note(self, record: RequestRecord, answer: Answer) -> None:
        reading = answer.reading
        record.outcome = answer.outcome
        record.status = answer.status
        record.reason = answer.reason
        record.retry_after_s = answer.retry_after_s
        record.request_id = answer.request_id or record.request_id
        record.sent_s = self._since_start(answer.sent)
        record.ended_s = self._since_start(answer.ended)
        record.first_text_s = self._since_start(reading.first_text)
        record.last_text_s = self._since_start(reading.texts[-1]) if reading.texts else None
        record.without_text = answer.outcome is Outcome.OK and not reading.texts
        record.gaps_ms = [round(g * 1e3, 3) for g in reading.gaps]
        record.prompt_tokens = reading.prompt_tokens
        record.completion_tokens = reading.completion_tokens
        record.cached_tokens = reading.cached_tokens
        self.progress.outcomes[record.outcome] += 1
        self.progress.met += record.met_targets is True
        self.progress.recent.append(record)

    def _since_start(self, instant: float | None) -> float | None:
        return None if instant is None else instant - self.start

    def _headers(self, record: RequestRecord) -> dict[str, str]:
        headers = {"x-request-id": record.request_id}
        if self._shape.send_targets:
            for name, value in (("x-ttft-target-ms", record.targets.ttft_ms), ("x-tbt-target-ms", record.targets.tbt_ms)):
                if value is not None:
                    headers[name] = f"{value:g}"
        return headers

    def _body(self, send: PlannedSend) -> bytes:
        """A greedy completion of exactly ``output_tokens`` tokens; ``min_tokens`` keeps end-of-text ids from being drawn."""
        rest = {
            "max_tokens": send.output_tokens,
            "min_tokens": send.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        head = b'{"model":' + json.dumps(self._shape.model).encode() + b',"prompt":'
        return head + self._prompts.json_prompt(send) + b"," + json.dumps(rest).encode()[1:]
