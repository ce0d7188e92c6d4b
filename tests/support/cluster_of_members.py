"""A small cluster told to a Conductor by its messages alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import (
    LiveAttempt,
    Liveness,
    Member,
    MemberChange,
    PrefillTiming,
    StepTiming,
    WorkerReport,
)
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.actions import Action
from moonpool.scheduler.conductor import Conductor

BLOCK = 16
LAYOUT = KVLayout("m", 2, 1, 8, "float32", block_tokens=BLOCK)


def keys(name: int, count: int) -> tuple[bytes, ...]:
    return tuple(bytes((name, i)).ljust(16, b"\0") for i in range(count))


def prefill_seconds(n: int, cached: int = 0) -> float:
    return 0.01 + 1e-3 * (n - cached)


def step_seconds(batch: int, context: int) -> float:
    return 0.02 + 1e-3 * batch + 1e-7 * context


@dataclass
class Cluster:
    conductor: Conductor = field(default_factory=Conductor)
    now: float = 100.0
    layout: KVLayout = LAYOUT
    lives: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def join(self, name: str, role: Role, node: str, *, ready: bool = True, max_prompt: int = 0) -> Member:
        life = self.lives[name] = self.lives.get(name, 0) + 1
        member = Member(
            MemberId(name),
            role,
            NodeId(node),
            Incarnation(life),
            f"{name}:1",
            1,
            layout=self.layout,
            ready=ready,
            max_prompt=max_prompt,
        )
        self.members[name] = member
        self.numbers[name if role is not Role.STORE else node] = 1
        self.conductor.observe(MemberChange(member, Liveness.LIVE), self.now)
        return member

    def change(self, name: str, liveness: Liveness = Liveness.LIVE, *, ready: bool = True) -> None:
        self.members[name] = replace(self.members[name], ready=ready)
        self.conductor.observe(MemberChange(self.members[name], liveness), self.now)

    def stored(self, holder: str, what: Sequence[bytes], *, tier: Tier = Tier.G2, store: str = "") -> list[Action]:
        number = self.numbers[holder]
        self.numbers[holder] += 1
        life = Incarnation(self.lives[store or holder])
        event = BlockEvent(BlockChange.STORED, tier, tuple(what))
        return self.conductor.observe(EventBatch(holder, life, number, (event,)), self.now)

    def report(
        self,
        name: str,
        attempts: Iterable[LiveAttempt] = (),
        *,
        prefills: Iterable[PrefillTiming] = (),
        steps: Iterable[StepTiming] = (),
        free_pages: int = 1_000,
    ) -> None:
        life = Incarnation(self.lives[name])
        self.conductor.observe(
            WorkerReport(MemberId(name), life, tuple(attempts), free_pages, 1_000, tuple(prefills), tuple(steps)), self.now
        )

    def teach(self, *names: str) -> None:
        """Reports from which prefill and step times can be fitted."""
        for name in names:
            self.report(
                name,
                prefills=[PrefillTiming(n, p, prefill_seconds(n, p)) for n in (64, 256, 1_000, 4_000) for p in (0, 48)],
                steps=[StepTiming(b, c * b, step_seconds(b, c * b)) for b in (1, 2, 4, 8) for c in (100, 1_000)],
            )

    def place(
        self,
        request: str,
        tokens: int = 100,
        *,
        attempt: int = 1,
        prompt: Sequence[bytes] = (),
        exclude: Sequence[str] = (),
        ttft_ms: float | None = None,
        tbt_ms: float | None = None,
        choices: int = 1,
    ) -> Placement | Refusal:
        asked = PlaceRequest(
            request,
            attempt,
            tuple(prompt),
            tokens,
            32,
            Targets(ttft_ms, tbt_ms),
            exclude=tuple(MemberId(name) for name in exclude),
            choices=choices,
        )
        answer = self.conductor.place(asked, self.now)
        assert not isinstance(answer, Later), answer
        return answer

    def placed(self, request: str, tokens: int = 100, **asked: object) -> Placement:
        answer = self.place(request, tokens, **asked)  # type: ignore[arg-type]
        assert isinstance(answer, Placement), answer
        return answer

    def finish(self, request: str, attempt: int = 1, *, ttft_ms: float = 0.0, cached: int = 0, output: int = 1) -> None:
        self.conductor.finished(Finished(request, attempt, 0, ttft_ms, 0.0, output, cached), self.now)

    def gauge(self, name: str) -> float:
        return self.conductor.numbers(self.now)[name]


def split(prefills: int = 2, decodes: int = 1, *, taught: bool = False) -> Cluster:
    """Node a: store and prefill workers; node b: store and decode workers."""
    cluster = Cluster()
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    names = [f"prefill-{i}" for i in range(prefills)] + [f"decode-{i}" for i in range(decodes)]
    for name in names:
        prefill = name.startswith("prefill")
        cluster.join(name, Role.PREFILL if prefill else Role.DECODE, "a" if prefill else "b")
    if taught:
        cluster.teach(*names)
    return cluster
