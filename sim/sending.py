"""The sender's side of hand-offs on the virtual clock: the production state machine, and one flow of bytes for each."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Failure, Reason
from moonpool.core.handoff import Drained
from moonpool.core.ids import NodeId
from moonpool.prefill_worker.chunk_planner import Chunk
from moonpool.prefill_worker.handoff_source import (
    Abandon,
    Action,
    Block,
    Drain,
    EmitBegun,
    EmitDrained,
    EmitFailure,
    EmitFirst,
    Push,
    ReleasePages,
    State,
)
from moonpool.sim.attempt import Try
from moonpool.sim.site import Site


class Sending:
    """Of one prefill node. ``broke``: the way broke while the prompt was computed; ``quiet``: nobody uses its pages."""

    def __init__(self, site: Site, node: NodeId, broke: Callable[[Try], None], quiet: Callable[[Try], None]) -> None:
        self._site = site
        self._node = node
        self._broke = broke
        self._quiet = quiet
        self._size = site.cluster.model.block_tokens
        self._layers = site.cluster.model.layers
        # The hand-off goes straight into the decode node's device pages, as one piece, where no store keeps it there.
        self._coarse = site.cluster.keep == "prefill"

    def open(self, attempt: Try, seconds: float) -> None:
        """KV leaves layer by layer while it is computed, for ``seconds``; the last layer when computing has ended."""
        before = self._bytes(attempt) * (self._layers - 1) / self._layers
        cap = max(before / max(seconds, 1e-9), 1.0)
        attempt.flow = self._site.links.send(
            self._node, attempt.placement.decode.node, before, lambda ok: self._pushed(attempt, ok), cap=cap, held=True
        )

    def computed(self, attempt: Try, chunk: Chunk) -> None:
        """``chunk`` is in pages."""
        if self._as_one_piece(attempt):
            blocks = [Block(0, attempt.pages[0], self._size)] if chunk.last else []
        else:
            first = 0 if chunk.number == 0 else chunk.start // self._size
            end = blocks_for(chunk.end, self._size) if chunk.last else chunk.end // self._size
            blocks = [self._block(attempt, index) for index in range(first, end)]
        self.perform(attempt, attempt.source.layer(chunk.number, 0, blocks))

    def _as_one_piece(self, attempt: Try) -> bool:
        return self._coarse or attempt.after is not None

    def _block(self, attempt: Try, index: int) -> Block:
        return Block(index, attempt.pages[index], min(attempt.tokens - index * self._size, self._size))

    def _bytes(self, attempt: Try) -> float:
        assert attempt.landing is not None
        tokens = attempt.tokens if self._as_one_piece(attempt) else sum(slot.valid for slot in attempt.landing.slots)
        return float(tokens * self._site.token_bytes)

    def _pushed(self, attempt: Try, ok: bool) -> None:
        """All bytes are at the decode node; or the way there broke."""
        attempt.flow = None
        decode = attempt.placement.decode
        lost = Failure(Reason.TRANSFER_FAILED, f"the way to {decode.node} broke", decode.id)
        if attempt.source.state is State.FINISHING and ok:
            self._site.decoders[decode.id].landed(attempt)
            self._drained(attempt)
        elif attempt.source.state is State.FINISHING:
            self.perform(attempt, attempt.source.failed(lost))
        elif not attempt.source.stop:
            self.perform(attempt, attempt.source.failed(lost))
            self._broke(attempt)

    def _drained(self, attempt: Try) -> None:
        assert attempt.landing is not None
        self._site.decoders[attempt.placement.decode.id].written(attempt)
        told = Drained(attempt.landing.id, int(self._bytes(attempt)), "simulated")
        self.perform(attempt, attempt.source.drained(told))

    def perform(self, attempt: Try, actions: list[Action]) -> None:
        decoder = self._site.decoders[attempt.placement.decode.id]
        for action in actions:
            match action:
                case EmitBegun(landing):
                    decoder.prefill_begun(attempt, landing)
                case Push():
                    pass  # the flow is under way already
                case EmitFirst(first):
                    decoder.prefill_done(attempt, first)
                case Drain():
                    if attempt.flow is not None:
                        self._site.links.release(attempt.flow, self._bytes(attempt) / self._layers)
                case Abandon():
                    if attempt.flow is not None:
                        self._site.links.stop(attempt.flow)
                        attempt.flow = None
                    self._drained(attempt)
                case EmitDrained(drained):
                    decoder.drained(attempt, drained)
                case EmitFailure(failure):
                    decoder.prefill_failed(attempt, failure)
                case ReleasePages():
                    self._quiet(attempt)
