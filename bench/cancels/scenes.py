"""How each window of a request's life is made wide enough to be hit at random: what clients do, and who pauses.

A pause is a SIGSTOP of one of our own processes, always shorter than ``timing.silent_after_ms`` of the cluster: a slow
process, not a dead one. Where a cancellation really struck is found out afterwards, not by the scene's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from moonpool.core.ids import Role
from moonpool.core.windows import Window

BLOCK = 16
PREFIXES, PREFIX_TOKENS = 6, 40 * BLOCK


@dataclass(frozen=True, slots=True)
class Pause:
    """Members of ``role`` (on ``node`` where given) stop one at a time for ``stop_ms``, then all run for ``run_ms``."""

    role: Role
    stop_ms: tuple[float, float]
    run_ms: tuple[float, float]
    node: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """Spans are (least, most). ``cut`` is in times of what the first event of an answer takes at the moment: the machine may
    be fast or crowded. It counts from the sent request, or from its first event where ``after_first``."""

    aim: Window
    cut: tuple[float, float]
    fresh: tuple[int, int] = (16, 600)  # prompt tokens that nobody has seen
    output: tuple[int, int] = (4, 24)
    shared: float = 0.3  # share of prompts that begin with one of the shared prefixes
    clients: int = 6
    after_first: bool = False
    forget: bool = False  # prefill workers drop their cached pages again and again
    pause: Pause | None = None


SCENES = (
    Scene(Window.QUEUED, (0.005, 0.5), clients=24),
    Scene(Window.PLACED, (0.1, 1.0), clients=8, pause=Pause(Role.PREFILL, (60, 200), (20, 60))),
    Scene(Window.RESERVING, (0.1, 1.0), pause=Pause(Role.STORE, (60, 200), (20, 60), "b")),
    Scene(Window.LOADING, (0.1, 1.0), (1, 64), shared=1.0, forget=True, pause=Pause(Role.STORE, (60, 200), (20, 60), "a")),
    Scene(Window.PREFILLING, (0.2, 1.0), (500, 900), shared=0.0, clients=3),
    Scene(Window.PUSHING, (0.01, 1.0), (400, 900), (24, 48), shared=0.1, clients=4, after_first=True),
    Scene(Window.SEALED, (0.1, 2.0), (16, 400), (24, 48), after_first=True, pause=Pause(Role.DECODE, (60, 200), (20, 50))),
    Scene(Window.DECODING, (0.02, 2.0), (16, 200), (150, 400), after_first=True),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``cut_s``: the client leaves then; ``deadline_s``: its budget ends then; neither: it wants its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    cut_s: float | None = None
    after_first: bool = False
    deadline_s: float | None = None
    answer: tuple[int, ...] = ()  # the oracle's, where it wants one


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt whose greedy answer the oracle gave, far from any tie."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Asks:
    """Draws requests. ``ids`` are (least, one past the largest)."""

    def __init__(self, seed: int, ids: tuple[int, int], known: list[Known], context: int) -> None:
        self._random = Random(seed)
        self._ids = ids
        self._known = known
        self._context = context
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]

    @property
    def random(self) -> Random:
        return self._random

    def warming(self) -> list[Ask]:
        """One for each shared prefix, so that the pool holds it."""
        return [Ask((*prefix, self._ids[0]), 2, False) for prefix in self._prefixes]

    def fresh(self, tokens: int, output: int) -> Ask:
        """A prompt that nobody has seen."""
        return Ask(self._tokens(tokens), output, False)

    def kept(self) -> Ask:
        known = self._random.choice(self._known)
        return Ask(known.prompt, len(known.answer), self._random.random() < 0.5, answer=known.answer)

    def cut(self, scene: Scene, first_s: float) -> Ask:
        """To be cancelled by its client, or, one of eight, by its own deadline. ``first_s``: as a scene's ``cut`` means it."""
        draw, fresh = self._random, self._tokens(self._random.randint(*scene.fresh))
        prefix = draw.choice(self._prefixes) if draw.random() < scene.shared else ()
        tokens = draw.randint(*scene.output)
        prompt = (*prefix, *fresh)[: self._context - tokens]
        at_s, stream = first_s * _between(draw, scene.cut), scene.after_first or draw.random() < 0.5
        if draw.random() < 1 / 8:
            return Ask(prompt, tokens, stream, deadline_s=at_s + first_s * scene.after_first)
        return Ask(prompt, tokens, stream, cut_s=at_s, after_first=scene.after_first)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(*self._ids) for _ in range(count))


def _between(draw: Random, span: tuple[float, float]) -> float:
    """Evenly on a logarithmic scale: short times are as likely as long ones."""
    low, high = span
    return float(low * (high / low) ** draw.random())


def next_scene(struck: Mapping[Window, int]) -> Scene:
    """The one that aims at the window hit least often so far."""
    return min(SCENES, key=lambda scene: struck.get(scene.aim, 0))
