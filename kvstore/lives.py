"""Who is alive, as far as it matters to slots: sessions begin, fall silent and end; deaths are proved; some are caused.

Silence fences, only proof frees. For a worker whose pidfd the agent holds, that descriptor is the only proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from moonpool.core.config import TimingConfig
from moonpool.core.errors import Busy, Failure, InvalidRequest, LayoutMismatch, MoonpoolError, PeerSilent
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.landing import Landing
from moonpool.core.membership import Liveness, Member, MemberChange, Peers
from moonpool.core.terms import Terms
from moonpool.kvstore.agent import Agent
from moonpool.kvstore.claims import LandingClaim, Life, Reach
from moonpool.kvstore.node_sessions import NodeSession, Sessions
from moonpool.kvstore.pool import Pool

LAST_BYTES_S = 0.1  # a dead peer's last bytes may still lie in our socket buffers: this long they are polled out
OnGone = Callable[[MemberId, Incarnation, str], None]
log = structlog.get_logger(__name__)


class Lives:
    """Event-loop only. ``changed()`` is called after every change of the pool, ``on_gone`` with every death proved here."""

    def __init__(
        self,
        member: Member,
        timing: TimingConfig,
        peers: Peers,
        pool: Pool,
        sessions: Sessions,
        agent_path: Path,
        clock: Callable[[], float],
        changed: Callable[[], None],
        on_gone: OnGone | None,
        cut: Callable[[Life], Awaitable[bool]],
    ) -> None:
        """``cut`` ends what may still be on its way from a remote writer, where its carrier can do that."""
        self._member = member
        self._timing = timing
        self._peers = peers
        self._pool = pool
        self._sessions = sessions
        self._clock = clock
        self._changed = changed
        self._on_gone = on_gone
        self._cut = cut
        self.agent = Agent(agent_path, sessions.life, self._proved_dead, self._moved_on)
        self._silent: dict[Life, asyncio.TimerHandle | None] = {}  # with the timer of the kill
        self._clients: set[Life] = set()  # users of the library: no members of the cluster
        self._leaving: dict[Life, asyncio.Task[None]] = {}  # proved gone, their last bytes being polled out
        self.terms = Terms()
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.agent.start()
        self._unsubscribe = self._peers.subscribe(self._peer_changed)

    def close(self) -> None:
        self._unsubscribe()
        for timer in [*self._silent.values(), *self._leaving.values()]:
            if timer is not None:
                timer.cancel()
        self.agent.close()

    # Questions.

    def is_frozen(self, life: Life) -> bool:
        return life in self._silent

    def reach(self, writer: Life) -> Reach:
        """Writers with a session here are of this host, and may map the regions; so may all of its node id."""
        if self._sessions.of(writer) is not None:
            return Reach.MAPPED
        known = self._peers.get(writer.member)
        if known is None or known.member.incarnation != writer.incarnation:
            return Reach.UNKNOWN
        return Reach.MAPPED if known.member.node == self._member.node else Reach.CARRIER

    def require_live(self, life: Life) -> None:
        """PeerSilent for a life that is over or silent: whatever it still asks for comes too late."""
        known = self._peers.get(life.member)
        if known is None:
            return
        if known.member.incarnation > life.incarnation:
            raise PeerSilent(f"{life.member} has a newer life, {known.member.incarnation}", peer=life.member)
        if known.member.incarnation == life.incarnation and known.liveness is not Liveness.LIVE:
            raise PeerSilent(f"{life.member} counts as {known.liveness}: {known.proof}", peer=life.member)

    def reader(self, life: Life) -> int:
        """The session of a landing's reader. Busy where it has none: it would never hear of what lands."""
        session = self._sessions.of(life)
        if session is None:
            raise Busy(f"{life.member} has no session with the store node of {self._member.node}", peer=life.member)
        return session.number

    # Beginnings.

    def admit(self, member: Member) -> NodeSession:
        """Open the session of a local worker. LayoutMismatch, InvalidRequest or PeerSilent where it does not belong here."""
        self._require_kin(member)
        life = Life(member.id, member.incarnation)
        self.require_live(life)
        for other in self._sessions:
            if other.life.member == member.id and other.life.incarnation > member.incarnation:
                raise PeerSilent(f"{member.id} has a newer life, {other.life.incarnation}", peer=member.id)
        self._replace_older(life, member.pid)
        return self._sessions.open(life)

    def admit_client(self, life: Life, pid: int, pidfd: int) -> NodeSession:
        """Open the session of a library user, whose process ``pid`` is watched through ``pidfd`` from now on.

        An older life of the same client is over: whoever comes back has stopped writing what it wrote before.
        """
        self._replace_older(life, pid)
        self.agent.watch(life, pid, pidfd)
        self._clients.add(life)
        return self._sessions.open(life, beats=False)

    def client_left(self, life: Life) -> None:
        """Its connection ended. Its process is watched on only while it might still write."""
        if life in self._clients and life not in self._pool.lives():
            self._clients.discard(life)
            self.agent.forget(life)

    def _require_kin(self, member: Member) -> None:
        if member.node != self._member.node:
            raise InvalidRequest(
                f"node: {member.id} is on {member.node}, this store node on {self._member.node}; connect to its own host's",
                param="node",
            )
        if member.layout is None:
            raise LayoutMismatch(f"{member.id} names no KV layout; start it with a model")
        self._pool.register(member.layout, member.id)
        mine, theirs = self._member.hash_key_id, member.hash_key_id
        if mine and theirs and mine != theirs:
            raise LayoutMismatch(f"hash key {mine} here, {theirs} at {member.id}; start both with the same cluster.key_file")
        if mine and theirs and self._member.kv_key_id != member.kv_key_id:
            here, there = self._member.kv_key_id or "none", member.kv_key_id or "none"
            raise LayoutMismatch(
                f"kv key {here} here, {there} at {member.id}; start both with the same security.kv_encryption and kv_key_file"
            )

    def _replace_older(self, newer: Life, pid: int) -> None:
        """A newer life ends the older ones. Their death is taken as proved, unless a pidfd of another process says no."""
        for session in self._sessions:
            if session.life.member == newer.member and session.life.incarnation < newer.incarnation:
                self._sessions.end(session, f"{newer.member} has a newer life")
        for life in self._pool.lives() | self.agent.lives() | set(self._silent):
            if life.member == newer.member and life.incarnation < newer.incarnation:
                if self.agent.is_process(life, pid):
                    self.agent.forget(life)  # it dropped everything before it came back under a new number
                if not self.agent.knows(life):
                    self._gone(life, "replaced by a newer life")
                elif self._timing.kill_after_ms:
                    self._kill(life)

    # Ends.

    def session_ended(self, session: NodeSession) -> None:
        if session.why is not None:
            log.warning("session_ended", member=session.life.member, why=session.why.message)
        self._pool.session_ended(session.number, self._clock())
        self._changed()

    def _proved_dead(self, life: Life) -> None:
        """The agent saw its process end."""
        proof = "its process ended (pidfd)"
        member = life not in self._clients
        self._gone(life, proof)
        if member and self._on_gone is not None:
            self._on_gone(life.member, life.incarnation, proof)

    def _moved_on(self, life: Life) -> None:
        """Its process came back as a newer life, which it does only after it dropped everything."""
        self._gone(life, "replaced by a newer life")

    def _peer_changed(self, change: MemberChange) -> None:
        self.terms.heard(change.member.term)
        life = Life(change.member.id, change.member.incarnation)
        if life.member == self._member.id:
            return
        if change.liveness is Liveness.LIVE:
            self._forget_silence(life)
            self._replace_older(life, change.member.pid)
            self._changed()
        elif change.liveness is Liveness.SILENT:
            self._fall_silent(life, change.proof, self._timing.kill_after_ms)
        elif self.agent.knows(life):  # said to be gone, but its process is still there: leaving, or replaced too early
            self._fall_silent(life, change.proof, 0)
        else:
            self._gone(life, change.proof)

    def _fall_silent(self, life: Life, proof: str, kill_after_ms: int) -> None:
        if life not in self._silent:
            loop = asyncio.get_running_loop()
            kill = loop.call_later(kill_after_ms / 1e3, self._kill, life) if kill_after_ms else None
            self._silent[life] = kill
        mine = self._written_by(life)
        broken = self._pool.writer_silent(life, self._clock())
        self._end(life, mine, broken, PeerSilent(f"{life.member} fell silent: {proof}", peer=life.member))

    def _kill(self, life: Life) -> None:
        if self.agent.kill(life):
            log.warning("killed", member=life.member, incarnation=life.incarnation)

    def _forget_silence(self, life: Life) -> None:
        timer = self._silent.pop(life, None)
        if timer is not None:
            timer.cancel()

    def _gone(self, life: Life, proof: str) -> None:
        self._forget_silence(life)
        self._clients.discard(life)
        mine = [c for c in self._pool.landings if c.writer_open and c.ask.writer == life]
        if all(claim.ask.reach is Reach.MAPPED for claim in mine):
            self._free(life, proof)
        elif life not in self._leaving:
            self._leaving[life] = asyncio.create_task(self._leave(life, proof), name=f"last bytes of {life.member}")
            self._changed()

    async def _leave(self, life: Life, proof: str) -> None:
        await asyncio.sleep(LAST_BYTES_S)
        await self._cut(life)
        self._free(life, proof)

    def _free(self, life: Life, proof: str) -> None:
        self._leaving.pop(life, None)
        mine = self._written_by(life)
        broken = self._pool.writer_gone(life, self._clock())
        self._end(life, mine, broken, PeerSilent(f"{life.member} is gone: {proof}", peer=life.member))

    def _written_by(self, life: Life) -> list[LandingClaim]:
        return [c for c in self._pool.landings if c.ask.writer == life and c.writer_open and not c.fenced]

    def _end(self, life: Life, landings: Sequence[LandingClaim], broken: Sequence[Landing], error: MoonpoolError) -> None:
        """Tell the readers of its ``landings`` which of them are ``broken``, and end its own session."""
        torn = {landing.id for landing in broken}
        for claim in landings:
            if claim.reader_open:
                failure = Failure.of(error) if claim.landing.id in torn else None
                self._sessions.tell_through(claim.ask.reader, claim.landing, failure)
        session = self._sessions.of(life)
        if session is not None:
            self._sessions.end(session, error.message)
        self._changed()
