"""How long answers get: a survival curve per tenant, turn and prompt size, learned online.

A life table over bins of output tokens (Cutler and Ederer, Journal of Chronic Diseases 1958): in each bin the share that
ended of those that entered it. Answers that were cut off there (the client left, the limit was reached) have entered by
half and not ended. A class with little behind it leans on all tenants' requests of its turn and size, those lean on all
requests, and these on a wide guess: in each bin as if ``LEAN`` more answers of the parent's kind had entered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST = 1 << 17  # tokens; longer answers count as this long
EDGES: Final[Floats] = np.unique(np.concatenate([[0.0], np.round(2.0 ** (np.arange(69) / 4.0))]))  # [bins + 1]
WIDTHS: Final[Floats] = np.diff(EDGES)
BIN_OF: Final[Ints] = np.searchsorted(EDGES, np.arange(LONGEST + 1), side="right") - 1  # bin that token count n lies in
LEAN = 20.0  # answers
GUESS_MEAN = 480.0  # tokens: of the first guess, S(x) = (mean / (mean + x))^2, whose median is 200
GUESS_LEAN = 2.0
KEPT = 4_000.0  # answers in one class; beyond it the old ones fade
TURNS = (1, 2, 3, 5)  # smallest of each class
PROMPTS = (0, 1_024, 4_096, 16_384)
KINDS = 2_048  # classes of single tenants; beyond it the one longest without news is dropped
REFIT_SHARE = 16  # a class's curve is made anew after one sixteenth as many answers again
SURE = 50.0  # answers

BIN_OF[-1] = len(WIDTHS) - 1
EVERYBODY = ""


@dataclass(frozen=True, slots=True)
class Survival:
    """``cumulative[b]``: endings per answer expected before bin b; ``rates[b]``: endings per token in it."""

    cumulative: Floats
    rates: Floats

    def beyond(self, tokens: Floats | float, produced: Floats | float = 0.0) -> Floats:
        """P(longer than ``tokens`` | longer than ``produced``), element by element; 1 up to ``produced``."""
        return np.exp(np.minimum(self._ended(produced) - self._ended(tokens), 0.0))

    def quantile(self, level: float, produced: float = 0.0) -> float:
        """Tokens that the answer, already longer than ``produced``, does not exceed with probability ``level``."""
        wanted = float(self._ended(produced)) - float(np.log1p(-min(level, 1.0 - 1e-9)))
        b = max(int(np.searchsorted(self.cumulative, wanted, side="right")) - 1, 0)
        return float(min(EDGES[b] + (wanted - self.cumulative[b]) / self.rates[b], LONGEST))

    def mean_left(self, produced: float = 0.0, most: float = LONGEST) -> float:
        """Expected tokens still to come, of at most ``most``."""
        at = np.unique(np.concatenate([[0.0], np.clip(EDGES - produced, 0.0, most), [most]]))
        alive = self.beyond(produced + at, produced)
        return float(np.sum((alive[1:] + alive[:-1]) / 2.0 * np.diff(at)))

    def _ended(self, tokens: Floats | float) -> Floats:
        capped = np.clip(tokens, 0.0, LONGEST)
        b = BIN_OF[np.asarray(capped).astype(np.int64)]
        return np.asarray(self.cumulative[b] + (capped - EDGES[b]) * self.rates[b])


@dataclass(slots=True)
class _Class:
    number: int  # row of the table
    parent: _Class | None
    endings: Floats = field(default_factory=lambda: np.zeros(len(WIDTHS)))
    entered: Floats = field(default_factory=lambda: np.zeros(len(WIDTHS)))
    answers: float = 0.0
    due: float = 0.0  # answers, here and at the root, at which its curve is made anew
    root_due: float = 0.0

    def add(self, length: float, *, ended: bool) -> None:
        if self.answers >= 2.0 * KEPT:
            for values in (self.endings, self.entered):
                values *= 0.5
            self.answers *= 0.5
            self.due, self.root_due = 0.0, 0.0
        b = int(BIN_OF[int(length)])
        self.entered[:b] += 1.0
        self.entered[b] += 1.0 if ended else 0.5
        self.endings[b] += ended
        self.answers += 1.0


class OutputLengths:
    """``table``: one row of cumulative endings and rates per class, for many sequences at once (``decode_forecast``)."""

    def __init__(self, *, kinds: int = KINDS) -> None:
        rows = 1 + len(TURNS) * len(PROMPTS) + kinds
        self.cumulative: Floats = np.zeros((rows, len(WIDTHS)))
        self.rates: Floats = np.zeros((rows, len(WIDTHS)))
        self._root = _Class(0, None)
        self._shared = {
            (turn, prompt): _Class(1 + turn * len(PROMPTS) + prompt, self._root)
            for turn in range(len(TURNS))
            for prompt in range(len(PROMPTS))
        }
        self._tenants: OrderedDict[tuple[str, int, int], _Class] = OrderedDict()  # the one longest without news first
        self._free = list(range(rows - 1, len(self._shared), -1))
        for known in (self._root, *self._shared.values()):
            self._fit(known)

    @property
    def sure(self) -> bool:
        return self._root.answers >= SURE

    def add(self, tenant: str, turn: int, prompt_tokens: int, output_tokens: int, *, ended: bool = True) -> None:
        """An answer of ``output_tokens``; ``ended`` false where it was cut off there."""
        if output_tokens < 1:
            return
        length = min(output_tokens, LONGEST) - 0.5  # it ended while its last token was the newest one
        leaf = self._leaf(tenant, turn, prompt_tokens)
        for known in (leaf, leaf.parent, self._root):
            if known is not None:
                known.add(length, ended=ended)

    def kind(self, tenant: str, turn: int, prompt_tokens: int) -> int:
        """The row of its curve in the table, brought up to date. ``turn`` 0, unknown: that of all requests.

        A tenant never heard of shares the row of all tenants.
        """
        if turn <= 0:
            return self._current(self._root)
        at = _bucket(turn, TURNS), _bucket(prompt_tokens, PROMPTS)
        return self._current(self._tenants.get((tenant, *at)) or self._shared[at])

    def survival(self, tenant: str, turn: int, prompt_tokens: int) -> Survival:
        row = self.kind(tenant, turn, prompt_tokens)
        return Survival(self.cumulative[row].copy(), self.rates[row].copy())

    def curve(self, kind: int) -> Survival:
        """Of the table's row ``kind``; good until the next answer is added."""
        return Survival(self.cumulative[kind], self.rates[kind])

    def _leaf(self, tenant: str, turn: int, prompt_tokens: int) -> _Class:
        at = _bucket(max(turn, 1), TURNS), _bucket(prompt_tokens, PROMPTS)
        leaf = self._tenants.get((tenant, *at))
        if leaf is None:
            if not self._free:
                self._free.append(self._tenants.popitem(last=False)[1].number)
            leaf = self._tenants[tenant, *at] = _Class(self._free.pop(), self._shared[at])
        self._tenants.move_to_end((tenant, *at))
        return leaf

    def _current(self, known: _Class) -> int:
        if known.answers >= known.due or self._root.answers >= known.root_due:
            self._fit(known)
        return known.number

    def _fit(self, known: _Class) -> None:
        if known.parent is None:
            lean, towards = GUESS_LEAN, 1.0 - ((GUESS_MEAN + EDGES[:-1]) / (GUESS_MEAN + EDGES[1:])) ** 2
        else:
            lean, towards = LEAN, -np.expm1(-self.rates[self._current(known.parent)] * WIDTHS)
        ended = -np.log1p(-(known.endings + lean * towards) / (known.entered + lean))  # of ``towards`` < 1, so is the share
        self.rates[known.number] = ended / WIDTHS
        self.cumulative[known.number, 1:] = np.cumsum(ended)[:-1]
        known.due = known.answers + max(1.0, known.answers // REFIT_SHARE)
        known.root_due = self._root.answers + max(1.0, self._root.answers // REFIT_SHARE)


def _bucket(value: int, smallest: tuple[int, ...]) -> int:
    return max(sum(value >= edge for edge in smallest) - 1, 0)
