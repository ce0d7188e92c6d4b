"""The generating endpoints: one visit is one HTTP request, admitted, answered or refused, and left exactly once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from starlette.requests import Request
from starlette.responses import Response

from moonpool.cluster.gateway.accounts import Accounts
from moonpool.cluster.gateway.answers import Stream, whole
from moonpool.cluster.gateway.attempts import slowest_tenth
from moonpool.cluster.gateway.bodies import CompletionBody, SamplingBody, StreamOptions
from moonpool.cluster.gateway.conductors import RETRY_AFTER_S
from moonpool.cluster.gateway.flights import Flight, RecentFlights, as_flight
from moonpool.cluster.gateway.generation import Generation, Run
from moonpool.cluster.gateway.http import BodyRoom, EventStream, error_response, read_body, unless_left, written_response
from moonpool.cluster.gateway.metrics import Metrics
from moonpool.cluster.gateway.served import Models, Served
from moonpool.cluster.gateway.shapes import Shape, Usage
from moonpool.cluster.gateway.shaping import shape_of, wanted_tokens
from moonpool.cluster.gateway.tenants.gate import Gate, Ticket
from moonpool.cluster.gateway.tenants.guard import caller_of, hear_out
from moonpool.cluster.gateway.tenants.usage import TenantUsage
from moonpool.cluster.tracing.ids import CLIENT_SPAN, ClientSpan, client_span, request_id
from moonpool.core.config import Config
from moonpool.core.errors import Bug, InvalidRequest, MoonpoolError, NoPath, RateLimited, Reason
from moonpool.core.lifetime import Instant, Lifetime, Lives

ID_HEADER = "x-moonpool-request-id"
CLIENT_ID_HEADER = "x-request-id"
_MAX_CLIENT_ID = 512
_FEWEST_TOKENS = 1 / 8  # per byte of a body: whoever has not so many left is refused before it is tokenised
_CUT = (Reason.CANCELLED.value, Reason.DEADLINE.value)  # outcomes of requests that might have gone on
_log = structlog.get_logger()


@dataclass(slots=True)
class Visit:
    """``id`` is ours: two clients may send the same id of theirs, which is only echoed."""

    id: str
    endpoint: str
    ticket: Ticket
    headers: dict[str, str] = field(default_factory=dict)
    lifetime: Lifetime = field(default_factory=Lifetime)
    outcome: str = Reason.CANCELLED.value
    held: int = 0  # choices counted as in flight
    body_bytes: int = 0  # held in memory until it leaves
    model: Served | None = None  # once the body said which
    generation: Generation | None = None
    left: bool = False
    client: ClientSpan | None = None  # in which it was sent, where traces are on

    @property
    def model_name(self) -> str:
        return self.model.name if self.model is not None else ""


class Endpoints:
    def __init__(self, config: Config, models: Models, metrics: Metrics, gate: Gate, usage: TenantUsage) -> None:
        self._config = config
        self._gate = gate
        self._usage = usage
        self._models = models
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._visits: dict[str, Visit] = {}
        self._room = BodyRoom(config.gateway.max_held_bytes)
        self.lifetimes = Lives()
        self.recent = RecentFlights()
        self._empty = asyncio.Event()
        self._empty.set()
        self.accounts: Accounts | None = None
        self.leaving = False  # nothing new is admitted
        self.in_flight = 0  # choices, queued or running

    async def answer(self, request: Request, endpoint: str, parse: Callable[[bytes], SamplingBody]) -> Response:
        visit = self._arrive(request, endpoint)
        try:
            return await self._answer(request, visit, parse)
        except MoonpoolError as e:
            return self._failed(visit, e)
        except asyncio.CancelledError:
            self._leave(visit)
            raise
        except Exception as e:  # noqa: BLE001  a defect is this request's 500, never the gateway's end
            _log.exception("request failed", request=visit.id)
            return self._failed(visit, Bug(f"gateway: {type(e).__name__}; see request {visit.id} in the gateway's log"))

    def _arrive(self, request: Request, endpoint: str) -> Visit:
        client = client_span(request.headers.get("traceparent", "")) if self._config.observe.otlp_endpoint else None
        visit = Visit(request_id(secrets.token_hex(12), client), endpoint, self._gate.ticket(caller_of(request)), client=client)
        visit.lifetime.stamp(Instant.ARRIVED, self._now())
        theirs = request.headers.get(CLIENT_ID_HEADER, visit.id)
        visit.headers[ID_HEADER] = visit.id
        if len(theirs) <= _MAX_CLIENT_ID and theirs.isascii() and theirs.isprintable():
            visit.headers[CLIENT_ID_HEADER] = theirs
        self._visits[visit.id] = visit
        self._empty.clear()
        return visit

    async def _answer(self, request: Request, visit: Visit, parse: Callable[[bytes], SamplingBody]) -> Response:
        await self._enter(request, visit)
        raw = await self._read(request, visit)
        visit.lifetime.stamp(Instant.READ, self._now())
        body = parse(raw)
        visit.lifetime.stamp(Instant.PARSED, self._now())
        caller = visit.ticket.caller
        model = visit.model = self._models.find(body.model, caller)
        visit.ticket.reserve(int(len(raw) * _FEWEST_TOKENS))
        self._admit(visit, body)
        making = model.intake.generation(visit.id, body, len(raw), request.headers, visit.lifetime, caller)
        generation = await unless_left(request, making)
        visit.ticket.reserve(wanted_tokens(generation, body))
        visit.headers.update(visit.ticket.headers())
        visit.generation = generation
        for run in generation.runs:
            run.attempts.watch = self._metrics.watch(model.name)
        shape = shape_of(visit.id, visit.generation, model, body)
        if body.stream:
            return await self._stream(request, visit, visit.generation, shape, body.stream_options or StreamOptions())
        text = await unless_left(request, whole(visit.generation, shape))
        visit.outcome = "ok"
        self._leave(visit)
        return written_response(text, headers=visit.headers)

    async def _stream(
        self, request: Request, visit: Visit, generation: Generation, shape: Shape, options: StreamOptions
    ) -> Response:
        def ended(outcome: str) -> None:
            visit.outcome = outcome

        stream = Stream(generation, shape, options, ended)
        await unless_left(request, stream.begin())
        return EventStream(stream.events(), headers=visit.headers, done=lambda: self._leave(visit))

    async def _enter(self, request: Request, visit: Visit) -> None:
        """RateLimited before the body is read, let alone tokenised."""
        try:
            visit.ticket.begin()
        except RateLimited:
            await hear_out(request.receive)
            raise

    async def _read(self, request: Request, visit: Visit) -> bytes:
        gateway = self._config.gateway
        raw = await read_body(request, gateway.max_body_bytes, gateway.body_ms / 1000, self._room)
        visit.body_bytes = len(raw)
        return raw

    @property
    def held_bytes(self) -> int:
        """Of the bodies of requests in flight."""
        return self._room.held

    def _admit(self, visit: Visit, body: SamplingBody) -> None:
        """Count the choices of every prompt as in flight until the visit leaves."""
        prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        limit, choices = self._config.timing.queue_limit, prompts * body.drawn
        if prompts > limit:
            raise InvalidRequest(f"prompt: {prompts} prompts in one request; give at most {limit}", param="prompt")
        if choices > limit:
            told = f"{body.drawn} choices of {prompts} prompt{'s' if prompts > 1 else ''} are {choices}"
            field = "n" if body.drawn == body.n else "best_of"
            raise InvalidRequest(f"{field}: {told}; ask for at most {limit} in one request", param=field)
        if self.leaving:
            raise NoPath("gateway: leaving; ask another one, or try again", retry_after_s=RETRY_AFTER_S)
        self._gate.take_places(visit.ticket.caller, choices, limit, visit.model_name)
        visit.held = choices
        self.in_flight += choices
        with self._metrics.guarded():
            self._metrics.in_flight.set(self.in_flight)

    def _failed(self, visit: Visit, error: MoonpoolError) -> Response:
        visit.outcome = error.reason.value
        if error.http_status >= 500:
            _log.warning("request failed", request=visit.id, reason=visit.outcome, message=error.message)
        visit.lifetime.stamp(Instant.REFUSED, self._now())
        self.recent.refused(visit.outcome, error.http_status)
        self._leave(visit)
        response = error_response(error)
        response.headers.update(visit.headers | visit.ticket.headers())
        return response

    def _leave(self, visit: Visit) -> None:
        """The one exit of answered, refused, failed and cancelled requests; later calls do nothing."""
        if visit.left:
            return
        visit.left = True
        del self._visits[visit.id]
        self._room.give(visit.body_bytes)
        if not self._visits:
            self._empty.set()
        self.in_flight -= visit.held
        self._gate.leave_places(visit.ticket.caller, visit.held, visit.model_name)
        self._settle(visit)
        with self._metrics.guarded():
            self.recent.ended(visit, self._now(), visit.headers.get(CLIENT_ID_HEADER, ""))
            self._metrics.in_flight.set(self.in_flight)
            self._metrics.left(visit.endpoint, visit.model_name, visit.outcome)
        if visit.generation is None:
            self._remember(visit, visit.id, 0, visit.lifetime)
        for run in visit.generation.runs if visit.generation else ():
            self._run_left(visit, run)
        with self._metrics.guarded():
            self._log_request(visit)

    def _run_left(self, visit: Visit, run: Run) -> None:
        request, life, usage = run.ledger.request, run.lifetime, run.usage
        life.facts |= {"output_tokens": usage.completion, "cached_tokens": usage.cached}
        self._remember(visit, request.id, run.ledger.number, life)
        with self._metrics.guarded():
            tbt_s = slowest_tenth(run.attempts.arrivals)
            self._metrics.count(visit.model_name, usage, run.ledger.number)
            if visit.outcome == "ok":
                self._metrics.finished(visit.model_name, life, run.choice.tokens, tbt_s)
            self._metrics.judge(visit.model_name, request.targets, visit.outcome, life, tbt_s)

    def _log_request(self, visit: Visit) -> None:
        """One line about it: names, counts and times, nothing that was asked or answered."""
        if not self._config.observe.log_requests:
            return
        runs = visit.generation.runs if visit.generation is not None else ()
        lives = [run.lifetime for run in runs] or [visit.lifetime]
        usage = Usage.total([run.usage for run in runs])
        ttft = [t for life in lives if (t := life.between(Instant.ARRIVED, Instant.FIRST_TOKEN)) is not None]
        _log.info(
            "request over",
            request=visit.id,
            tenant=visit.ticket.caller.tenant,
            model=visit.model_name,
            endpoint=visit.endpoint,
            outcome=visit.outcome,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.completion,
            choices=len(runs),
            attempts=sum(run.ledger.number for run in runs),
            ttft_s=round(min(ttft), 6) if ttft else None,
            seconds=round(self._now() - visit.lifetime.at[Instant.ARRIVED], 6),
        )

    def _settle(self, visit: Visit) -> None:
        """A prompt counts once something came of it, or would have, had its client not left or given it so little time."""
        runs = visit.generation.runs if visit.generation is not None else ()
        cut = visit.outcome in _CUT
        parts = [run.usage for run in runs if run.begun or (cut and Instant.PLACED in run.lifetime.at)]
        taken = Usage.total(parts)
        visit.ticket.end(taken.prompt + taken.completion)
        if self.accounts is not None:
            self.accounts.left(visit, taken)
        if self._gate.tenants:
            with self._metrics.guarded():
                self._usage.count(visit.ticket.caller.tenant, visit.outcome, taken)

    def _remember(self, visit: Visit, request: str, attempt: int, lifetime: Lifetime) -> None:
        """``attempt`` is the last one; 0: none was begun."""
        if visit.outcome in _CUT and Instant.FINISHED not in lifetime.at:
            lifetime.stamp(Instant.CANCELLED, self._now())
        lifetime.facts |= {"tenant": visit.ticket.caller.tenant, "model": visit.model_name, "endpoint": visit.endpoint}
        lifetime.facts |= {"outcome": visit.outcome} | ({CLIENT_SPAN: visit.client.span} if visit.client else {})
        self.lifetimes.add(request, attempt, lifetime)

    def flights(self, most: int) -> list[Flight]:
        """Requests under way, the newest first."""
        return [self.flight(visit) for visit in list(self._visits.values())[: -most - 1 : -1]]

    def flight(self, visit: Visit) -> Flight:
        return as_flight(visit, self._now(), visit.headers.get(CLIENT_ID_HEADER, ""))

    def running(self, name: str) -> Visit | None:
        """The visit under way with our id ``name``, or with a choice of that name."""
        found = self._visits.get(name)
        return found or next((v for v in self._visits.values() if v.generation and name in _names(v.generation)), None)

    async def drain(self, seconds: float) -> None:
        """Wait until every visit has left, at most ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            pass

    def end_all(self, error: MoonpoolError) -> None:
        """Every generation still running ends with ``error``."""
        for visit in self._visits.values():
            if visit.generation is not None:
                visit.generation.end(error)


def _names(generation: Generation) -> list[str]:
    return [run.ledger.request.id for run in generation.runs]
