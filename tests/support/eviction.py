"""Random life of blocks in a tier, told to a policy and to a list that does everything by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from moonpool.core.use import Use
from moonpool.kvstore.eviction.policy import Cooler, EvictionPolicy

USES = (Use(), Use("a", "chat", 1, 900), Use("a", "chat", 3, 9_000), Use("b", "agent", 7, 40_000))


@dataclass
class Block:
    row: int
    key: bytes
    parent: Block | None
    at: int  # block number in its prompt
    call: int  # number of the newest call that used it
    stored_call: int
    uses: int = 1
    children: int = 0
    pinned: bool = False
    cooled: int = 0  # number of the call that cooled it; 0: it was used since


Rank = Callable[[Block], tuple[int, ...]]


@dataclass
class Machine:
    """``rank``: the reference order of candidates, lowest first; None where the policy defines none."""

    policy: EvictionPolicy
    rank: Rank | None = None
    live: dict[int, Block] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    calls: int = 0
    keys: int = 0
    now: float = 0.0

    def candidates(self) -> list[Block]:
        return [block for block in self.live.values() if not block.children and not block.pinned]

    def store(self, under: int, count: int, use: Use) -> None:
        """A request hits the chain that ends at some live block (or nothing) and stores ``count`` blocks behind it."""
        blocks = list(self.live.values())
        parent = blocks[under % len(blocks)] if blocks and under else None
        chain = []
        while parent is not None:
            chain.append(parent)
            parent = parent.parent
        chain.reverse()
        if chain:
            self.calls += 1
            for block in chain:
                block.uses = 1 if block.cooled else block.uses + 1
                block.call, block.cooled = self.calls, 0
            self.policy.used([block.row for block in chain], 0, use, self.now)
        self.calls += 1
        new: list[Block] = []
        for _ in range(count):
            row = self.free.pop(0) if self.free else len(self.live)
            self.keys += 1
            above = new[-1] if new else (chain[-1] if chain else None)
            at = len(chain) + len(new)
            block = Block(row, self.keys.to_bytes(16, "little"), above, at, self.calls, self.calls)
            self.live[row] = block
            new.append(block)
        if chain and not chain[-1].children and not chain[-1].pinned:
            self.policy.withhold([chain[-1].row])
        for block in new:
            if block.parent is not None:
                block.parent.children += 1
        rows = [block.row for block in new]
        if self.policy.wants_keys:
            self.policy.named(rows, [block.key for block in new])
        self.policy.stored(rows, chain[-1].at + 1 if chain else 0, use, self.now)
        self.policy.offer(rows[-1:])

    def pin(self, which: int) -> None:
        blocks = list(self.live.values())
        if blocks:
            block = blocks[which % len(blocks)]
            block.pinned = not block.pinned
            if not block.children:
                (self.policy.withhold if block.pinned else self.policy.offer)([block.row])

    def cool(self, which: int, blocks_up: int) -> None:
        """Some live block and a few before it were taken over by another node."""
        assert isinstance(self.policy, Cooler)
        blocks = list(self.live.values())
        self.calls += 1
        block = blocks[which % len(blocks)] if blocks else None
        chain = []
        while block is not None and blocks_up:
            block.cooled = self.calls
            chain.append(block.row)
            block, blocks_up = block.parent, blocks_up - 1
        self.policy.cool(chain[::-1], self.now)

    def lose(self, which: int) -> None:
        """A leaf leaves without the policy's choice."""
        leaves = self.candidates()
        if leaves:
            block = leaves[which % len(leaves)]
            if which % 2:
                self.policy.withhold([block.row])
            self._remove([block])

    def evict(self, n: int) -> None:
        may = {block.row: block for block in self.candidates()}
        rows = self.policy.choose(n, self.now)
        assert len(set(rows)) == len(rows)
        assert set(rows) <= may.keys()
        assert len(rows) == min(n, len(may))
        if self.rank is not None:
            expected = sorted(may.values(), key=self._place)[:n]
            assert rows == [block.row for block in expected]
        self._remove([may[row] for row in rows])

    def _place(self, block: Block) -> tuple[int, ...]:
        assert self.rank is not None
        return (0, block.cooled, block.row) if block.cooled else (1, *self.rank(block), block.row)

    def _remove(self, blocks: list[Block]) -> None:
        freed = []
        for block in blocks:
            del self.live[block.row]
            self.free.append(block.row)
            if block.parent is not None:
                block.parent.children -= 1
                if not block.parent.children and not block.parent.pinned:
                    freed.append(block.parent.row)
        self.policy.removed([block.row for block in blocks])
        self.policy.offer(freed)

    def empty(self) -> None:
        """Everything can be evicted in the end: no candidate was lost on the way."""
        for block in list(self.live.values()):
            if block.pinned:
                block.pinned = False
                if not block.children:
                    self.policy.offer([block.row])
        while self.live:
            before = len(self.live)
            self.evict(3)
            assert len(self.live) < before

    def step(self, action: Action) -> None:
        kind, a, b = action
        self.now += a % 7 * 11.0
        match kind:
            case "store":
                self.store(a, b % 5 + 1, USES[(a + b) % len(USES)])
            case "pin":
                self.pin(a)
            case "lose":
                self.lose(a)
            case "cool":
                self.cool(a, b % 6 + 1)
            case _:
                self.evict(b % 6 + 1)


Action = tuple[str, int, int]
KINDS = ("store", "store", "store", "pin", "lose", "evict")


def actions_of(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Action]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 40), st.integers(0, 40)), max_size=60)


ACTIONS = actions_of(KINDS)
COOLING_ACTIONS = actions_of((*KINDS, "evict", "cool", "cool"))
