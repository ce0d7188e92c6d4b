"""What conductors hear of device pages equals the page pool's index, whatever they missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.events import BlockChange
from moonpool.core.ids import Incarnation, MemberId
from moonpool.engine.journal import SNAPSHOT_EVERY, PageJournal
from moonpool.engine.pages import PagePool
from moonpool.wire.frames import Kind, decode_events, decode_snapshot, kind_of


class Follower:
    """A conductor that keeps count of the numbers."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.number: int | None = None

    def hear(self, frame: bytes) -> None:
        if kind_of(frame) is Kind.SNAPSHOT:
            snapshot = decode_snapshot(frame)
            self.keys = {key for _, keys in snapshot.entries for key in keys}
            self.number = snapshot.number
            return
        batch = decode_events(frame)
        if self.number is None or batch.number != self.number + 1:
            self.number = None  # a gap: waits for a snapshot
            return
        self.number += len(batch.events)
        for event in batch.events:
            changed = set(event.keys)
            self.keys = self.keys | changed if event.change is BlockChange.STORED else self.keys - changed


@given(st.lists(st.tuples(st.sampled_from(["publish", "clear", "report", "lose", "resync"]), st.integers(0, 9)), max_size=80))
def test_a_follower_in_step_holds_what_the_pool_holds(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(6)
    journal = PageJournal(pool, MemberId("p"), Incarnation(1))
    follower = Follower()
    for what, n in calls:
        key = bytes([n]) * 16
        if what == "publish":
            (page,) = pool.allocate(1)
            pool.publish(page, key, None)
            pool.release([page])
        elif what == "clear":
            pool.clear_cached()
        elif what == "resync":
            journal.resync()
        elif what == "lose":
            journal.frames()
        else:
            for frame in journal.frames():
                follower.hear(frame)
    for _ in range(SNAPSHOT_EVERY + 1):
        for frame in journal.frames():
            follower.hear(frame)
    assert follower.keys == {bytes([n]) * 16 for n in range(10) if pool.peek([bytes([n]) * 16])}


def test_after_a_resync_the_next_frame_is_a_snapshot() -> None:
    pool = PagePool(2)
    journal = PageJournal(pool, MemberId("p"), Incarnation(1))
    assert [kind_of(f) for f in journal.frames()] == [Kind.SNAPSHOT]
    assert journal.frames() == ()
    journal.resync()
    assert [kind_of(f) for f in journal.frames()] == [Kind.SNAPSHOT]
