"""The decode forecast of a whole cluster, kept up to date by reports and bookings and computed when it is asked for.

A course is made anew when sequences came or left, and every few seconds; in between it foretold that they grow. A booking
is added to the course there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moonpool.core.ids import MemberId
from moonpool.core.membership import LiveAttempt
from moonpool.core.placement import Finished, PlaceRequest
from moonpool.scheduler.bookings import Booking, End
from moonpool.scheduler.decode_forecast import Ahead, Course, DecodeForecast, Expected, course, joined
from moonpool.scheduler.output_length import LONGEST, OutputLengths

REFRESH_S = 2.0

Fits = Callable[[MemberId], tuple[float, ...]]  # a, b, c of a worker's step
Bookings = Callable[[MemberId], Iterable[Booking]]  # those it decodes or will


class DecodeCourses:
    def __init__(self, bookings: Bookings, fits: Fits) -> None:
        self.lengths = OutputLengths()
        self._bookings, self._fits = bookings, fits
        self._forecast = DecodeForecast()
        self._courses: dict[MemberId, Course] = {}
        self._attempts: dict[MemberId, tuple[LiveAttempt, ...]] = {}
        self._heard: dict[MemberId, float] = {}
        self._stale: set[MemberId] = set()
        self._now = 0.0

    def kind(self, request: PlaceRequest) -> int:
        """The class that the answer to ``request`` is expected to be of."""
        return self.lengths.kind(request.tenant, request.turn, request.prompt_tokens)

    def learn(self, request: PlaceRequest, done: Finished) -> None:
        """How long the answer to ``request`` got, and whether it had to end there."""
        ended = done.outcome == "ok" and done.output_tokens < request.max_tokens
        self.lengths.add(request.tenant, max(request.turn, 1), request.prompt_tokens, done.output_tokens, ended=ended)

    def reported(self, worker: MemberId, attempts: tuple[LiveAttempt, ...], now: float) -> None:
        known = self._attempts.get(worker, ())
        self._attempts[worker], self._now = attempts, max(self._now, now)
        self._heard[worker] = now
        made = self._courses.get(worker)
        grown_only = [(a.request, a.attempt, a.output_tokens > 0) for a in known] == [
            (a.request, a.attempt, a.output_tokens > 0) for a in attempts
        ]
        if made is None or not grown_only or now - made.begins > REFRESH_S:
            self._stale.add(worker)

    def booked(self, booking: Booking) -> None:
        self._now = max(self._now, booking.placed_at)
        made = self._courses.get(booking.decode)
        if made is None or booking.decode in self._stale:
            self._stale.add(booking.decode)
            return
        fit = self._fits(booking.decode)
        self._write(booking.decode, joined(made, _landing(booking), self.lengths, fit), fit)

    def forget(self, worker: MemberId) -> None:
        self._forecast.forget(worker)
        for known in (self._courses, self._attempts, self._heard):
            known.pop(worker, None)
        self._stale.discard(worker)

    def ahead(self, workers: tuple[MemberId, ...], at: float, window_s: float, tokens: int) -> Ahead:
        """See ``DecodeForecast.ahead``."""
        for worker in self._stale.intersection(workers):
            begins, fit = self._heard.get(worker, self._now), self._fits(worker)
            self._write(worker, course(self._expected(worker), self.lengths, fit, begins), fit)
        self._stale.clear()
        return self._forecast.ahead(workers, at, window_s, tokens)

    def _write(self, worker: MemberId, made: Course, fit: tuple[float, ...]) -> None:
        self._courses[worker] = made
        self._forecast.write(worker, made, fit)

    def _expected(self, worker: MemberId) -> list[Expected]:
        booked = {(booking.request, booking.attempt): booking for booking in self._bookings(worker)}
        out = []
        for attempt in self._attempts.get(worker, ()):
            booking = booked.pop((attempt.request, attempt.attempt), None)
            if booking is not None and attempt.output_tokens == 0:
                out.append(_landing(booking))
                continue
            produced = attempt.output_tokens
            kind = 0 if booking is None else booking.kind
            out.append(Expected(attempt.prompt_tokens + produced, produced, attempt.remaining_tokens, kind))
        return [*out, *(_landing(booking) for booking in booked.values() if booking.at_decode is End.COMING)]


def _landing(booking: Booking) -> Expected:
    return Expected(booking.prompt_tokens, 0, booking.most or LONGEST, booking.kind, booking.prefilled_at)
