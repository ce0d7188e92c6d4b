"""The attempts a decode worker is busy with, and which attempt of a request is the newest one it has heard of."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.core.errors import Reason
from moonpool.core.ids import RequestId
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, Emission, PromptLogprobs
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.decode_worker.stream import TokenStream

REMEMBERED = 8_192  # requests whose newest attempt is remembered after it ended


@dataclass(eq=False, slots=True)
class Live:
    """One attempt from its admission until nothing of it is left.

    ``stop`` is set once while KV comes in from elsewhere: it makes that end early, and whoever brings the KV lets go of
    the pages afterwards. ``family``: all choices of its prompt, if there are several, until the prompt is computed; the
    sequence of the first one, the lead, stands for all of them, also when its own choice is over.
    """

    attempt: Attempt
    placement: Placement
    stream: TokenStream
    sequence: Sequence
    life: Lifetime = field(default_factory=Lifetime)
    stop: Callable[[], None] | None = None
    deadline: asyncio.TimerHandle | None = None
    cached_tokens: int = 0
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    fetch_seconds: float = 0.0
    fetched_tokens: int = 0  # of the loaded ones, from other nodes
    emitted: int = 0  # emissions with an id
    over: bool = False  # its last word is said
    family: list[Live] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # from the prefill worker, not told yet

    @property
    def members(self) -> list[Live]:
        """Those for whom its prompt is computed, whether they still want it or not; the lead first."""
        return self.family or [self]

    @property
    def wanted(self) -> bool:
        """Somebody waits for its prompt."""
        return any(not member.over for member in self.members)

    @property
    def waits(self) -> bool:
        """Nothing is done for it yet."""
        return self.members[0].sequence.phase is Phase.WAITING

    @property
    def request(self) -> RequestId:
        return self.attempt.request.id

    def facts(self, last: Emission | None) -> dict[str, str | int | float]:
        """For logs and traces; ``last`` is its last word, where that is not its last id."""
        cancelled = Instant.CANCELLED in self.life.at
        outcome = last.error.reason.value if last and last.error else Reason.CANCELLED.value if cancelled else "ok"
        prefill = self.placement.prefill.id
        return {"outcome": outcome, "prefill": prefill, "output_tokens": self.emitted, "cached_tokens": self.cached_tokens}

    @property
    def position(self) -> int:
        """Of the next id."""
        return len(self.sequence.tokens) - len(self.attempt.request.prompt)

    @property
    def possible(self) -> int:
        """Ids that may still come."""
        request = self.attempt.request
        most = min(request.sampling.max_tokens, self.sequence.limit - len(request.prompt))
        return max(most - self.position, 0)


class Attempts:
    """Live attempts by request: one each. Only the newest (request, attempt) counts; older ones are refused for good."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Live] = {}
        self._leads: dict[tuple[RequestId, int], Live] = {}  # of families
        self._newest: OrderedDict[RequestId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[Live]:
        return list(self._live.values())

    def get(self, request: RequestId, attempt: int) -> Live | None:
        live = self._live.get(request)
        return live if live is not None and live.attempt.number == attempt else None

    def lead(self, request: RequestId, attempt: int) -> Live | None:
        """As ``get``; also one that is over, while its sequence stands for a family."""
        return self._leads.get((request, attempt)) or self.get(request, attempt)

    def join(self, members: list[Live]) -> None:
        """Live attempts that become one family."""
        for member in members:
            member.family = members
        self._leads[members[0].sequence.name] = members[0]

    def part(self, lead: Live) -> list[Live]:
        """Its family, which is none any more; empty where there was none."""
        members = lead.family
        if members:
            del self._leads[lead.sequence.name]
        for member in members:
            member.family = []
        return members

    def supersede(self, request: RequestId, attempt: int) -> tuple[bool, Live | None]:
        """Whether ``attempt`` is newer than all heard of, and the older attempt that must end because of it."""
        if attempt <= self._newest.get(request, -1):
            return False, None
        self._newest[request] = attempt
        self._newest.move_to_end(request)
        while len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return True, self._live.get(request)

    def add(self, live: Live) -> None:
        self._live[live.request] = live

    def remove(self, live: Live) -> bool:
        """False when it was gone already, or replaced."""
        if self._live.get(live.request) is not live:
            return False
        del self._live[live.request]
        return True
