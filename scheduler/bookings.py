"""What the conductor has promised but workers do not report yet, and which promises are over.

A booking has two ends, the prefill and the decode worker. Each end counts until the worker's own report shows the
attempt (from then on the report is what counts) or shows that it is gone. A booking ends with ``finished``, with the
loss of a worker, when reports say so, or when the request's budget has run out: nothing stays booked for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moonpool.core.ids import MemberId
from moonpool.core.membership import LiveAttempt
from moonpool.scheduler.prefill_queue import Waiting

PREFILL_GRACE_S = 0.3  # a job not reported this long after its placement ran between two reports, or never came
DECODE_GRACE_S = 5.0  # the gateway opens the stream at once; after this it never will
GONE_GRACE_S = 1.0  # a report written just before the attempt came back (another stream, a preemption) is not an end


class End(Enum):
    COMING = "coming"  # placed, not in a report yet
    SEEN = "seen"  # counted through the worker's reports
    OVER = "over"


@dataclass(slots=True)
class Part:
    """Tokens [begin, end) of a prompt that ``worker`` computes for another one: ``seconds`` of its time."""

    worker: MemberId
    seconds: float
    begin: int
    end: int
    at: End = End.COMING


@dataclass(slots=True)
class Booking:
    """``prefill_s`` seconds of work at ``prefill``, ``parts`` at those who help it, then ``prompt_tokens`` of context at
    ``decode``."""

    number: int
    request: str
    attempt: int
    prefill: MemberId
    decode: MemberId
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int  # predicted: not to be computed at ``prefill``
    placed_at: float
    prefilled_at: float  # predicted
    keys: tuple[bytes, ...] = ()  # of the prompt's blocks
    kind: int = 0  # class of its answer's length (``output_length``)
    most: int = 0  # tokens its answer can have; 0: not known
    choices: int = 1  # sequences at ``decode``
    at_prefill: End = End.COMING
    at_decode: End = End.COMING
    missing_since: float | None = None  # at the decode worker, after having been seen
    parts: tuple[Part, ...] = ()
    asked_at: float = 0.0  # predicted: when ``prefill`` begins; those who help it may not know of it before

    @property
    def workers(self) -> set[MemberId]:
        return {self.prefill, self.decode, *(part.worker for part in self.parts)}

    def begin(self, worker: MemberId) -> int:
        """The first token that ``worker`` computes."""
        return next((part.begin for part in self.parts if part.worker == worker), self.cached_tokens)

    def still_coming(self) -> list[tuple[MemberId, float]]:
        """Who computes of it without having reported it, and for how many seconds."""
        out = [(part.worker, part.seconds) for part in self.parts if part.at is End.COMING]
        return [*out, (self.prefill, self.prefill_s)] if self.at_prefill is End.COMING else out


@dataclass(slots=True)
class Coming:
    """What is booked on one worker and not in its reports yet."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    jobs: int = 0
    sequences: int = 0
    context_tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """At most one booking per request: a later one replaces it."""

    lifetime_s: float
    bookings: dict[str, Booking] = field(default_factory=dict)  # by request, oldest first
    computing: dict[str, Booking] = field(default_factory=dict)  # those whose prefill has not been seen to end
    _by_worker: dict[MemberId, dict[str, Booking]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bookings)

    def add(self, booking: Booking) -> None:
        self.release(booking.request)
        self.bookings[booking.request] = self.computing[booking.request] = booking
        for worker in booking.workers:
            self._by_worker.setdefault(worker, {})[booking.request] = booking

    def release(self, request: str) -> None:
        booking = self.bookings.pop(request, None)
        self.computing.pop(request, None)
        if booking is not None:
            for worker in booking.workers:
                mine = self._by_worker[worker]
                del mine[request]
                if not mine:
                    del self._by_worker[worker]

    def left(self, worker: MemberId, attempt: LiveAttempt, reported: int) -> int:
        """Prompt tokens still to compute: a job that waits is reported whole, what of it is cached shows when it begins."""
        booking = self.bookings.get(attempt.request)
        if booking is None or booking.attempt != attempt.attempt:
            return reported
        return min(reported, attempt.prompt_tokens - booking.begin(worker))

    def coming(self, worker: MemberId) -> Coming:
        total = Coming()
        for booking in self._by_worker.get(worker, {}).values():
            if booking.prefill == worker and booking.at_prefill is End.COMING:
                total.prefill_s += booking.prefill_s
                total.prefill_tokens += booking.prompt_tokens - booking.cached_tokens
                total.jobs += 1
            for part in booking.parts:
                if part.worker == worker and part.at is End.COMING:
                    total.prefill_s += part.seconds
                    total.prefill_tokens += part.end - part.begin
                    total.jobs += 1
            if booking.decode == worker and booking.at_decode is End.COMING:
                total.sequences += booking.choices
                total.context_tokens += booking.prompt_tokens
        return total

    def decoding(self, worker: MemberId) -> list[Booking]:
        """The bookings that end at ``worker``."""
        return [booking for booking in self._by_worker.get(worker, {}).values() if booking.decode == worker]

    def waiting(self, worker: MemberId) -> list[Waiting]:
        """The prefills booked on ``worker`` and not in its reports yet."""
        return [
            Waiting(booking.request, seconds, booking.placed_at)
            for booking in self._by_worker.get(worker, {}).values()
            for name, seconds in booking.still_coming()
            if name == worker
        ]

    def expire(self, now: float) -> list[Booking]:
        """Release what is older than ``lifetime_s``."""
        old = []
        for booking in self.bookings.values():
            if booking.placed_at + self.lifetime_s > now:
                break
            old.append(booking)
        for booking in old:
            self.release(booking.request)
        return old

    def lose(self, worker: MemberId) -> list[Booking]:
        """``worker`` is gone or silent, its attempts move: release all it takes part in."""
        lost = list(self._by_worker.get(worker, {}).values())
        for booking in lost:
            self.release(booking.request)
        return lost

    def report(self, worker: MemberId, alive: set[tuple[str, int]], now: float) -> list[Booking]:
        """Compare with the attempts that ``worker`` says it holds; returns the bookings that this ends."""
        ended = []
        for booking in list(self._by_worker.get(worker, {}).values()):
            here = (booking.request, booking.attempt) in alive
            late = now - booking.placed_at >= PREFILL_GRACE_S
            for part in booking.parts:
                if part.worker == worker:
                    part.at = _seen(part.at, here, late and now - booking.asked_at >= PREFILL_GRACE_S)
            if booking.prefill == worker:
                booking.at_prefill = _seen(booking.at_prefill, here, late)
                if booking.at_prefill is End.OVER:
                    self.computing.pop(booking.request, None)
            if booking.decode == worker and _decode_ended(booking, here, now):
                ended.append(booking)
                self.release(booking.request)
        return ended


def _seen(at: End, here: bool, late: bool) -> End:
    """What a prefill worker's report says of a job there; ``late``: it had time to report it."""
    if here:
        return End.SEEN if at is End.COMING else at
    return End.OVER if late or at is End.SEEN else at


def _decode_ended(booking: Booking, here: bool, now: float) -> bool:
    if here:
        booking.at_decode, booking.missing_since = End.SEEN, None
        return False
    if booking.at_decode is End.COMING:
        return now - max(booking.placed_at, booking.prefilled_at) >= DECODE_GRACE_S
    if booking.missing_since is None:
        booking.missing_since = now
    return now - booking.missing_since >= GONE_GRACE_S
