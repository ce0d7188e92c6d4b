"""Landings: granted lists of slots that one writer fills and one reader (a session) copies from.

A landing is over when both are through with it. Its sealed blocks carry one pin of the landing until then; its other
slots (tail, blocks another writer sealed first, unfinished ones) come free then. If the reader gives up or the writer
falls silent before the writer said ``Drained``, those slots are fenced meanwhile: nothing is verified or sealed any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import Busy, InvalidRequest
from moonpool.core.ids import RequestId
from moonpool.core.landing import Landing, LandingSlot, PushNotice
from moonpool.core.layout import KVLayout
from moonpool.core.lifetime import Instant, Lives
from moonpool.kvstore.claims import Expected, LandingAsk, LandingClaim, Life, Target
from moonpool.kvstore.holdings import Holdings


def tail_key(request: RequestId, attempt: int, block: int) -> bytes:
    """The private key of an unfinished last block: seeds its digests, and is never findable."""
    name = f"{request}\0{attempt}\0{block}".encode()
    return hashlib.blake2b(name, digest_size=KEY_BYTES, person=b"moonpool tail").digest()


class Landings:
    def __init__(self, holdings: Holdings) -> None:
        self.lives = Lives()
        self._held = holdings
        self._claims: dict[int, LandingClaim] = {}
        self._granted: dict[tuple[RequestId, int, Life], int] = {}
        self._orphans: dict[bytes, list[tuple[LandingClaim, Target]]] = {}  # complete blocks that wait for this parent

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[LandingClaim]:
        return iter(list(self._claims.values()))

    def get(self, landing: int) -> LandingClaim | None:
        return self._claims.get(landing)

    def grant(self, ask: LandingAsk, now: float) -> Landing:
        """All or nothing. Asking again for the same attempt answers the same landing. Busy, with numbers, if it cannot.

        LayoutMismatch: the layout is not registered here.
        """
        account = self._held.accounts.number(ask.layout, ask.use.tenant)
        again = self._granted.get((ask.request, ask.attempt, ask.writer))
        if again is not None:
            return self._same(self._claims[again], ask)
        held, missing = self._split(ask, account)
        index = self._held.index
        above = None if ask.parent is None else index.row(ask.parent)
        anchor = [] if above is None else [above]
        rows = [row for _, row in held]
        self._held.pin(rows + anchor)
        try:
            slots = self._held.take(account, len(missing) + (ask.tail_valid > 0), now)
        except Busy:
            self._held.unpin(rows + anchor)
            raise
        if held:
            index.touch(rows, held[0][0], ask.use, now)
        for target, slot in zip(missing, slots, strict=False):
            target.slot = slot
        if ask.tail_valid:
            missing.append(self._tail(ask, slots[-1]))
        return self._record(ask, account, missing, held, anchor, now)

    def _same(self, claim: LandingClaim, ask: LandingAsk) -> Landing:
        old = claim.ask
        if (old.layout, old.keys, old.first_block, old.tail_valid) != (ask.layout, ask.keys, ask.first_block, ask.tail_valid):
            raise InvalidRequest(
                f"attempt {ask.attempt} of request {ask.request} was granted landing {claim.landing.id} for other blocks; "
                "ask with the same keys, or under a new attempt",
                param="keys",
            )
        return claim.landing

    def _split(self, ask: LandingAsk, account: int) -> tuple[list[tuple[int, int]], list[Target]]:
        """(prompt block, row) of what is in DRAM, and targets, without a slot yet, for what is not."""
        held: list[tuple[int, int]] = []
        missing: list[Target] = []
        parent, index, layout_of = ask.parent, self._held.index, self._held.accounts.layout_of
        for block, key in enumerate(ask.keys, ask.first_block):
            row = index.row(key)
            if row is not None and layout_of[index.account[row]] is not layout_of[account]:
                layout_of[index.account[row]].require_same(ask.layout, ask.writer.member)
            if row is not None and index.slot[row] >= 0:
                held.append((block, row))
            else:
                findable = parent is not None or block == 0
                left = (1 << ask.layout.layers) - 1
                missing.append(Target(-1, key, parent, block, ask.layout.block_tokens, left, findable, coming=findable))
            parent = key
        return held, missing

    def _tail(self, ask: LandingAsk, slot: int) -> Target:
        block = ask.first_block + len(ask.keys)
        key = tail_key(ask.request, ask.attempt, block)
        return Target(slot, key, None, block, ask.tail_valid, (1 << ask.layout.layers) - 1, findable=False, coming=False)

    def _record(
        self, ask: LandingAsk, account: int, targets: list[Target], held: list[tuple[int, int]], anchor: list[int], now: float
    ) -> Landing:
        landing = Landing(
            self._held.next_id(),
            ask.request,
            ask.attempt,
            self._held.node,
            self._held.incarnation,
            ask.generation,
            ask.writer.member,
            tuple(LandingSlot(t.block, self._held.slots.ref(t.slot, t.key), t.valid) for t in targets),
            tuple(LandingSlot(block, self._held.ref_of(row), ask.layout.block_tokens) for block, row in held),
        )
        by_slot = {target.slot: target for target in targets}
        claim = LandingClaim(landing, ask, account, by_slot, [row for _, row in held], anchor, len(targets))
        claim.life.stamp(Instant.LANDING_GRANTED, now)
        if not targets:
            claim.life.stamp(Instant.SEALED, now)
        self._claims[landing.id] = claim
        self._granted[ask.request, ask.attempt, ask.writer] = landing.id
        self._held.expect([target.key for target in targets if target.coming])
        return landing

    def expected(self, notice: PushNotice) -> tuple[KVLayout | None, list[Expected]]:
        """The slices of ``notice`` that are still missing: those to verify. Duplicates are left out and counted.

        With the landing's layout; None, and no slices, where the landing is over or fenced.

        InvalidRequest: the notice names slots, layers or token counts that its landing does not have.
        """
        claim = self._claims.get(notice.landing)
        known = claim is not None and (claim.landing.request, claim.landing.attempt) == (notice.request, notice.attempt)
        if claim is None or not known or claim.fenced:
            self._held.counted["notices_ignored"] += 1
            return None, []
        layers = claim.ask.layout.layers
        if not 0 <= notice.layer < layers:
            raise InvalidRequest(f"notice: layer {notice.layer} of {layers}", param="layer")
        out = []
        for piece in notice.slices:
            slot = self._held.slots.at(piece.region, piece.offset)
            target = None if slot is None else claim.targets.get(slot)
            if target is None or piece.valid != target.valid:
                raise InvalidRequest(
                    f"notice: landing {notice.landing} has no slot at region {piece.region} offset {piece.offset} "
                    f"with {piece.valid} tokens",
                    param="slices",
                )
            if target.left >> notice.layer & 1:
                ref = self._held.slots.ref(target.slot, target.key)
                out.append(Expected(notice.landing, target.slot, ref, target.block, target.valid, piece.digest))
        self._held.counted["slices_repeated"] += len(notice.slices) - len(out)
        return claim.ask.layout, out

    def misses(self, landing: int, slot: int, layer: int) -> bool:
        """Whether this slice may still land; one that landed before, or whose landing is over, is counted as late."""
        claim = self._claims.get(landing)
        target = None if claim is None or claim.fenced else claim.targets.get(slot)
        if target is not None and target.left >> layer & 1:
            return True
        self._held.counted["slices_late"] += 1
        return False

    def landed(self, landing: int, slot: int, layer: int, now: float) -> None:
        """A slice that ``misses`` was verified and lies in its slot with its digest. The last layer seals a whole block."""
        claim = self._claims[landing]
        target = claim.targets[slot]
        target.left &= ~(1 << layer)
        target.bad &= target.left
        if not target.left:
            claim.incomplete -= 1
            if not claim.incomplete:
                claim.life.stamp(Instant.SEALED, now)
            if target.findable:
                self._complete(claim, target, now)

    def rejected(self, landing: int, slot: int, layer: int) -> None:
        """A slice failed its digest: it stays missing, and its writer hears of it."""
        claim = self._claims.get(landing)
        if claim is not None and slot in claim.targets:
            claim.targets[slot].bad |= claim.targets[slot].left & (1 << layer)

    def missing(self, landing: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]] | None:
        """(block, layer) of what has not landed, and of that what was rejected. None: unknown or fenced."""
        claim = self._claims.get(landing)
        if claim is None or claim.fenced:
            return None
        missing, bad, layers = [], [], range(claim.ask.layout.layers)
        for target in claim.targets.values():
            if target.left:
                missing += [(target.block, layer) for layer in layers if target.left >> layer & 1]
                bad += [(target.block, layer) for layer in layers if target.bad >> layer & 1]
        return missing, bad

    def settled(self, landing: int) -> bool:
        """Whether waiting for more slices is of no use: all are in, one was rejected, or the landing is over."""
        claim = self._claims.get(landing)
        return claim is None or claim.fenced or not claim.incomplete or any(t.bad for t in claim.targets.values())

    def _complete(self, claim: LandingClaim, target: Target, now: float) -> None:
        if target.parent is None or self._held.index.row(target.parent) is not None:
            self._seal_chain([(claim, target)], now)
        else:
            self._orphans.setdefault(target.parent, []).append((claim, target))

    def wake(self, keys: Iterable[bytes], now: float) -> None:
        """``keys`` were sealed: so may their children that are complete and wait for them."""
        for key in keys if self._orphans else ():
            self._seal_chain(self._orphans.pop(key, []), now)

    def _seal_chain(self, ready: list[tuple[LandingClaim, Target]], now: float) -> None:
        """The first seal of a key wins. A loop, not a recursion: prompts are thousands of blocks long."""
        while ready:
            claim, target = ready.pop()
            self._stop_coming(target)
            row = self._held.seal_one(target.key, target.parent, target.slot, claim.account, target.block, claim.ask.use, now)
            if row is None:
                self._held.counted["seals_lost"] += 1
                continue
            target.row = row
            self._held.pin([row])
            ready.extend(self._orphans.pop(target.key, []))

    def _stop_coming(self, target: Target) -> None:
        if target.coming:
            target.coming = False
            self._held.expect_no_more((target.key,))

    def drained(self, landing: int, writer: Life, now: float) -> bool:
        """The writer's word that it writes no more. False where the landing is unknown, over, or somebody else's."""
        claim = self._claims.get(landing)
        if claim is None or claim.ask.writer != writer or not claim.writer_open:
            self._held.counted["drains_ignored"] += 1
            return False
        self.writer_through(claim, now)
        return True

    def writer_through(self, claim: LandingClaim, now: float) -> None:
        """By its word or by proof: nothing can be written under this claim any more."""
        claim.writer_open = False
        if claim.ask.reader is None:
            claim.reader_open = False
        for target in claim.targets.values():
            if target.left:
                self._stop_coming(target)
        self._settle(claim, now)

    def end(self, landing: int, now: float) -> bool:
        """The reader is through. Slots that the writer may still write are fenced. False where it had ended before."""
        claim = self._claims.get(landing)
        if claim is None or not claim.reader_open:
            return False
        claim.reader_open = False
        self._held.unpin(claim.held)
        claim.held = []
        if claim.writer_open:
            claim.life.stamp(Instant.CANCELLED, now)
            self.fence(claim)
        self._settle(claim, now)
        return True

    def fence(self, claim: LandingClaim) -> None:
        """From now on nothing of this claim is verified or sealed; its unsealed slots wait for proof."""
        if claim.fenced:
            return
        claim.fenced = True
        self._granted.pop((claim.ask.request, claim.ask.attempt, claim.ask.writer), None)
        for target in claim.targets.values():
            self._forget(target)
            if target.row is None:
                self._held.slots.fence([target.slot])

    def _forget(self, target: Target) -> None:
        """Nobody need wait for this target any more, nor it for its parent."""
        self._stop_coming(target)
        if target.parent is None:
            return
        waiting = self._orphans.get(target.parent, [])
        left = [one for one in waiting if one[1] is not target]
        if left:
            self._orphans[target.parent] = left
        elif waiting:
            del self._orphans[target.parent]

    def _settle(self, claim: LandingClaim, now: float) -> None:
        """When writer and reader are both through, everything the landing held comes free."""
        if claim.writer_open or claim.reader_open:
            return
        claim.life.stamp(Instant.FINISHED, now)
        self.lives.add(claim.landing.request, claim.landing.attempt, claim.life)
        del self._claims[claim.landing.id]
        self._granted.pop((claim.ask.request, claim.ask.attempt, claim.ask.writer), None)
        for target in claim.targets.values():
            self._forget(target)
            if target.row is None:
                self._held.release(claim.account, [target.slot])
            else:
                self._held.unpin([target.row])
        self._held.unpin(claim.held + claim.anchor)
