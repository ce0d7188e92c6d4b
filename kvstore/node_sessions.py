"""The node's end of its workers' sessions: who is here, what they are told, and when they count as silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from moonpool.core.errors import Failure, PeerSilent
from moonpool.core.landing import Landing
from moonpool.kvstore.claims import Life
from moonpool.wire import pb

OUTBOX = 8192  # messages a worker may leave unread: about 270 prompts of 30 layers
LOOKS_PER_SILENCE = 4


class NodeSession:
    """One stream of one life. ``outbox`` ends with None; ``why`` then says why the node ended it, if it did.

    ``beats``: it is over after a silence. A library user's is not: its connection says when it ends.
    """

    def __init__(self, number: int, life: Life, now: float, beats: bool) -> None:
        self.number = number
        self.life = life
        self.heard = now
        self.beats = beats
        self.outbox: asyncio.Queue[pb.store.StoreMessage | None] = asyncio.Queue(OUTBOX + 1)
        self.why: PeerSilent | None = None


class Sessions:
    """``on_end`` hears of every session that is over, once, before anything else can happen."""

    def __init__(self, silent_after_s: float, clock: Callable[[], float], on_end: Callable[[NodeSession], None]) -> None:
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._on_end = on_end
        self._sessions: dict[int, NodeSession] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[NodeSession]:
        return iter(list(self._sessions.values()))

    def open(self, life: Life, *, beats: bool = True) -> NodeSession:
        """A new session; an older one of the same life is ended by it."""
        self._numbers += 1
        session = NodeSession(self._numbers, life, self._clock(), beats)
        for other in self:
            if other.life == session.life:
                self.end(other, f"{life.member} opened another session")
        self._sessions[session.number] = session
        return session

    def get(self, number: int) -> NodeSession:
        """PeerSilent where the session is over: whoever asks connects again."""
        session = self._sessions.get(number)
        if session is None:
            raise PeerSilent(f"session {number} is over: connect to the store node again")
        return session

    def life(self, number: int) -> Life | None:
        session = self._sessions.get(number)
        return None if session is None else session.life

    def of(self, life: Life) -> NodeSession | None:
        return next((s for s in self._sessions.values() if s.life == life), None)

    def tell(self, number: int | None, message: pb.store.StoreMessage) -> None:
        """Relay to a session, if it is still there. One that does not read what it is told is ended, not waited for."""
        session = None if number is None else self._sessions.get(number)
        if session is None:
            return
        if session.outbox.qsize() >= OUTBOX:
            self.end(session, f"{session.life.member} left {OUTBOX} messages unread")
            return
        session.outbox.put_nowait(message)

    def tell_through(self, number: int | None, landing: Landing, failure: Failure | None) -> None:
        """Nothing more comes into ``landing``: for want of its writer, or (no ``failure``) because all is in."""
        through = pb.store.LandingFailed(landing=landing.id, request=landing.request, attempt=landing.attempt)
        if failure is not None:
            through.error.CopyFrom(pb.types.Error(reason=failure.reason.value, message=failure.message, peer=failure.peer))
        self.tell(number, pb.store.StoreMessage(failed=through))

    def end(self, session: NodeSession, why: str = "") -> None:
        """Over, by the worker's leave (no ``why``) or by the node's decision. Again is a no-op."""
        if self._sessions.pop(session.number, None) is None:
            return
        session.why = PeerSilent(why) if why else None
        while session.outbox.full():
            session.outbox.get_nowait()
        session.outbox.put_nowait(None)
        self._on_end(session)

    async def watch(self) -> None:
        """Runs for the node's life: ends sessions without a beat. Time that this process itself slept does not count."""
        pause = self._silent_after_s / LOOKS_PER_SILENCE
        before = self._clock()
        while True:
            await asyncio.sleep(pause)
            now = self._clock()
            overslept = now - before - pause
            before = now
            for session in self:
                if overslept > pause:
                    session.heard += overslept  # beats may wait unread in the socket
                if session.beats and now - session.heard > self._silent_after_s:
                    self.end(session, f"no beat of {session.life.member} for {now - session.heard:.1f} s")
