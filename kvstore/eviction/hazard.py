"""Learned reuse hazard: the blocks of requests whose conversation is least likely to go on soon go first.

Blocks are grouped by their newest user, one group a request: a block used again moves to the newer group, and what stays
behind (beyond what many prompts share) is worth little. The group of the lowest index (``reuse``) gives its deepest
block. Until enough returns were seen the oldest group goes first, which is LRU.

The policy remembers the keys of evicted blocks for a while (``named``), so that it learns from returns it could not serve.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence

import numpy as np

from moonpool.core.use import Use
from moonpool.kvstore.eviction.hazard_tables import BINS, EDGES, WIDTH
from moonpool.kvstore.eviction.reuse import ReuseHazard

LEFTOVER = 0.02  # weight of blocks that a newer request of the conversation did not use
SHARED_FROM = 30  # continuations of a block from which on it is common to many conversations
SAME_REQUEST_S = 2.0  # calls of one request for the same use come at most this far apart
REFIT_S = 30.0
FIRST_FIT_S = 30.0
RERANK_S = 1.0
REMEMBERED_KEYS = 1 << 16
KINDS = 64
RUNNING = 4096  # requests whose next call, or whose end, may come
TURNS = (2, 3, 4, 5, 7, 10, 15)
GAPS_S = (0, 15, 30, 60, 90, 150, 240, 400, 700)
GROWTH = (0, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
HALF_OCTAVES = 40  # of token counts
OCTAVES = HALF_OCTAVES // 2
TURN_OCTAVES = (len(TURNS) + 1) * OCTAVES
CODES = (KINDS, len(TURNS) + 1, HALF_OCTAVES, len(GAPS_S) + 1, len(GROWTH) + 2, TURN_OCTAVES)  # see _coded
CODES_OF_ENDED = (*CODES, HALF_OCTAVES, TURN_OCTAVES)  # see _with_output


class Group:
    """The blocks whose newest user is one request."""

    __slots__ = ("born", "codes", "cold", "curve", "left", "number", "open", "output", "serial", "turn", "use", "value")

    def __init__(self, serial: int, use: Use, turn: int, born: float) -> None:
        self.serial = serial
        self.use = use
        self.turn = turn
        self.born = born
        self.number = 0  # its request in the model
        self.codes: tuple[int, ...] = ()
        self.output = 0  # code of its output's length; 0 until it ended
        self.curve = (0, 0)  # number of the fit, and the row of its curve then
        self.open: list[tuple[int, int]] = []  # heap of (-block number, row): candidates, some stale
        self.value: float | None = None  # its place in the order of groups, if it has one
        self.left = False  # a newer request of the conversation went another way
        self.cold = False  # another node took these blocks over

    def cooled(self, serial: int) -> Group:
        """The same request, for those of its blocks that were cooled."""
        twin = Group(serial, self.use, self.turn, self.born)
        twin.number, twin.codes, twin.output, twin.cold = self.number, self.codes, self.output, True
        return twin


class Hazard:
    name = "hazard"
    wants_keys = True

    def __init__(self) -> None:
        self._running = ReuseHazard(CODES)
        self._ended = ReuseHazard(CODES_OF_ENDED)  # the same requests, by the length of their output too
        self._next = self._ended  # the two take turns, so that no pause is twice as long
        self._newest: dict[Use, Group] = {}
        self._ends = 0
        self._owner: list[Group | None] = []
        self._at: list[int] = []  # block number in the prompt
        self._candidate = bytearray()
        self._listed = bytearray()  # by row: has an item in its owner's heap
        self._continued = bytearray()  # how often new blocks were stored right behind this one
        self._keys: list[bytes] = []
        self._gone: dict[bytes, Group] = {}  # newest user of evicted blocks, oldest first
        self._unfinished: dict[tuple[Use, int], tuple[Group, int]] = {}  # by use and next block: request, and its last row
        self._kinds: dict[tuple[str, str], int] = {}
        self._serial = 0
        self._order: list[tuple[float, int, Group]] = []  # heap; an item whose value is not its group's is stale
        self._late: list[Group] = []  # to be put in the order
        self._ranked_at = -RERANK_S
        self._fits = 0
        self._fit_at: float | None = None
        self._curves = np.zeros((64, BINS))
        self._curve_of: dict[tuple[int, ...], int] = {}

    # What happens.

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        self._grow(max(rows, default=-1) + 1)
        for row, key in zip(rows, keys, strict=True):
            self._keys[row] = key

    def used(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        if not rows:
            return
        owner = self._owner[rows[-1]]
        again = owner is not None and owner.use == use and now - owner.born <= SAME_REQUEST_S
        if owner is None or owner.cold or not again:
            shared = self._continued[rows[-1]] >= SHARED_FROM
            group = self._begin(use, None if shared or again else owner, now)
            common = next((i for i in range(len(rows) - 1, -1, -1) if self._continued[rows[i]] >= SHARED_FROM), -1)
            self._take(rows[: common + 1], group)
            for old in self._take(rows[common + 1 :], group):
                self._leave(old)
            owner = group
        self._expect(use, first + len(rows), owner, rows[-1])

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        if not rows:
            return
        self._grow(max(rows) + 1)
        before = self._parent_in_the_past(rows)
        group, above = self._unfinished.pop((use, first), (None, -1))
        if above >= 0 and self._continued[above] < SHARED_FROM:
            self._continued[above] += 1
        if group is None or (now - group.born > SAME_REQUEST_S and before is not None):
            group = self._begin(use, before, now)
        elif before is not None and before is not group:
            self._follow(group, before, now)
        for at, row in enumerate(rows, first):
            self._owner[row] = group
            self._at[row] = at
            self._candidate[row] = self._listed[row] = self._continued[row] = 0
        self._expect(use, first + len(rows), group, rows[-1])

    def cool(self, rows: Sequence[int], now: float) -> None:
        """See ``policy.Cooler``. What many conversations share stays as it is."""
        of: dict[Group, list[int]] = {}
        for row in rows:
            owner = self._owner[row]
            if owner is not None and self._continued[row] < SHARED_FROM:
                of.setdefault(owner, []).append(row)
        for owner, its in of.items():
            self._serial += 1
            self._take(its, owner.cooled(self._serial))

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        group = self._newest.pop(use, None)
        if group is not None:
            self._ends += 1
            group.output = _half_octave(output_tokens)
            group.curve = (0, 0)
            self._ended.recode(group.number, _with_output(group))
            if group.value is not None:
                self._late.append(group)

    def offer(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._candidate[row] = 1
            self._list(row)

    def withhold(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._candidate[row] = 0

    def removed(self, rows: Sequence[int]) -> None:
        for row in rows:
            owner, key = self._owner[row], self._keys[row]
            if owner is not None and key:
                self._gone.pop(key, None)
                self._gone[key] = owner
            self._owner[row] = None
            self._keys[row] = b""
            self._candidate[row] = 0
        while len(self._gone) > REMEMBERED_KEYS:
            del self._gone[next(iter(self._gone))]

    # Requests and their conversations.

    def _begin(self, use: Use, parent: Group | None, now: float) -> Group:
        if self._fit_at is None:
            self._fit_at = now + FIRST_FIT_S
        self._serial += 1
        group = Group(self._serial, use, use.turn, now)
        group.codes = self._coded(group, None, now)
        group.number = self._running.begin(group.codes, now)
        self._ended.begin(_with_output(group), now)
        self._newest.pop(use, None)
        self._newest[use] = group
        if len(self._newest) > RUNNING:
            del self._newest[next(iter(self._newest))]
        if parent is not None:
            self._follow(group, parent, now)
        return group

    def _follow(self, group: Group, parent: Group, now: float) -> None:
        """``group`` is the next request of ``parent``'s conversation."""
        self._running.followed(parent.number, now)
        self._ended.followed(parent.number, now)
        self._leave(parent)
        group.turn = max(group.use.turn, parent.turn + 1)
        group.codes = self._coded(group, parent, now)
        group.curve = (0, 0)
        self._running.recode(group.number, group.codes)
        self._ended.recode(group.number, _with_output(group))

    def _coded(self, group: Group, parent: Group | None, now: float) -> tuple[int, ...]:
        use = group.use
        kind = self._kind(use)
        turn = bisect.bisect_right(TURNS, group.turn)
        prompt = _half_octave(use.prompt_tokens)
        gap = growth = 0
        if parent is not None:
            gap = bisect.bisect_right(GAPS_S, now - parent.born)
            growth = bisect.bisect_right(GROWTH, use.prompt_tokens - parent.use.prompt_tokens) + 1
        return kind, turn, prompt, gap, growth, turn * OCTAVES + prompt // 2

    def _kind(self, use: Use) -> int:
        """Clients name kinds, as many as they like: from some number on, new ones are one and the same."""
        named = (use.tenant, use.kind)
        if len(self._kinds) < KINDS - 2:
            return self._kinds.setdefault(named, len(self._kinds) + 1)
        return self._kinds.get(named, KINDS - 1)

    def _parent_in_the_past(self, rows: Sequence[int]) -> Group | None:
        """The newest user of the deepest of these blocks that was here before and was evicted."""
        found = None
        for row in rows:
            found = self._gone.pop(self._keys[row], found)
        return found

    def _expect(self, use: Use, block: int, group: Group, last: int) -> None:
        self._unfinished.pop((use, block), None)
        self._unfinished[use, block] = (group, last)
        if len(self._unfinished) > RUNNING:
            del self._unfinished[next(iter(self._unfinished))]

    # Who owns what.

    def _take(self, rows: Sequence[int], group: Group) -> set[Group]:
        """Move rows to ``group``; returns whose they were."""
        owner, candidate, listed = self._owner, self._candidate, self._listed
        old = {before for row in rows if (before := owner[row]) is not None}
        for row in rows:
            owner[row] = group
            listed[row] = 0
            if candidate[row]:
                self._list(row)
        return old

    def _leave(self, group: Group) -> None:
        if not group.left:
            group.left = True
            if group.value is not None:
                self._late.append(group)

    def _list(self, row: int) -> None:
        group = self._owner[row]
        if group is not None and not self._listed[row]:
            self._listed[row] = 1
            heapq.heappush(group.open, (-self._at[row], row))
            if group.value is None:
                self._late.append(group)

    def _deepest(self, group: Group) -> int | None:
        """The deepest candidate of the group."""
        while group.open:
            at, row = group.open[0]
            if self._owner[row] is group and self._at[row] == -at and self._listed[row]:
                if self._candidate[row]:
                    return row
                self._listed[row] = 0
            heapq.heappop(group.open)
        return None

    # Choosing.

    def choose(self, n: int, now: float) -> list[int]:
        if self._fit_at is not None and now >= self._fit_at:
            self._fit_at = now + REFIT_S / 2
            self._next = self._ended if self._ends and self._next is self._running else self._running
            if self._next.fit(now):
                self._fits += 1
                self._curve_of.clear()
                self._ranked_at = now - RERANK_S
        if now - self._ranked_at >= RERANK_S:
            self._rank_all(now)
        elif self._late:
            late, self._late = self._late, []
            self._rank(late, now)
        out: list[int] = []
        while len(out) < n and self._order:
            value, _, group = self._order[0]
            row = self._deepest(group) if value == group.value else None
            if row is None:
                heapq.heappop(self._order)
                if value == group.value:
                    group.value = None
                continue
            self._candidate[row] = 0
            out.append(row)
        return out

    def _rank_all(self, now: float) -> None:
        groups = [group for value, _, group in self._order if value == group.value] + self._late
        self._order.clear()
        self._late.clear()
        self._ranked_at = now
        for group in groups:
            group.value = None
        self._rank(groups, now)

    def _rank(self, groups: list[Group], now: float) -> None:
        """Give each group that has candidates its place."""
        groups = [group for group in groups if self._deepest(group) is not None]
        if not groups:
            return
        for group, value in zip(groups, self._values(groups, now), strict=True):
            if group.value != value:
                group.value = value
                heapq.heappush(self._order, (value, group.serial, group))

    def _values(self, groups: Sequence[Group], now: float) -> list[float]:
        if not self._fits:
            return [0.0 if group.cold else 1.0 / (1.0 + now - group.born) for group in groups]
        curves = np.fromiter((self._curve(group) for group in groups), np.int64, len(groups))
        age = now - np.fromiter((group.born for group in groups), np.float64, len(groups))
        weight = np.fromiter(map(_weight, groups), np.float64, len(groups))
        bins = np.clip(np.searchsorted(EDGES, age, side="right") - 1, 0, BINS - 2)
        part = np.clip((age - EDGES[bins]) / WIDTH[bins], 0.0, 1.0)
        values: list[float] = (
            weight * (self._curves[curves, bins] * (1 - part) + self._curves[curves, bins + 1] * part)
        ).tolist()
        return values

    def _curve(self, group: Group) -> int:
        """The row of the group's curve in this fit."""
        fit, row = group.curve
        if fit != self._fits:
            known = self._ended.fitted and group.output
            codes = _with_output(group) if known else group.codes
            row = self._curve_of.setdefault(codes, len(self._curve_of))
            if row == len(self._curve_of) - 1:
                if row == len(self._curves):
                    self._curves = np.concatenate((self._curves, np.zeros_like(self._curves)))
                self._curves[row] = (self._ended if known else self._running).index(codes)
            group.curve = (self._fits, row)
        return row

    def _grow(self, rows: int) -> None:
        if rows > len(self._owner):
            more = max(rows, 2 * len(self._owner)) - len(self._owner)
            self._owner.extend([None] * more)
            self._at.extend([0] * more)
            self._keys.extend([b""] * more)
            for flags in (self._candidate, self._listed, self._continued):
                flags.extend(bytes(more))


def _weight(group: Group) -> float:
    return 0.0 if group.cold else LEFTOVER if group.left else 1.0


def _half_octave(tokens: int) -> int:
    return min(int(2 * math.log2(tokens + 1)), HALF_OCTAVES - 1)


def _with_output(group: Group) -> tuple[int, ...]:
    return (*group.codes, group.output, group.codes[1] * OCTAVES + group.output // 2)
