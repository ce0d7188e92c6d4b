"""From scores to one pair of workers, and whether it meets the request's targets."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.errors import Reason
from moonpool.core.placement import Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.board import Board, Usable
from moonpool.scheduler.min_ttft import DecodeScores, PrefillScores, Prompt, least, step_at

TRIES = 8  # pairs looked at for one request; only one that carries targets needs more than the first
MIN_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. ``high`` includes the spread of the fit; only a ``sure`` one can miss a target."""

    likely: float
    high: float
    sure: bool

    def misses(self, target_ms: float | None) -> bool:
        return self.sure and target_ms is not None and self.high * 1e3 > target_ms


@dataclass(frozen=True, slots=True)
class Option:
    """Rows of the board, and what is to be expected of the pair."""

    prefill: int
    decode: int
    wait_s: float
    ttft: Prediction
    tbt: Prediction

    def meets(self, targets: Targets) -> bool:
        return not (self.ttft.misses(targets.ttft_ms) or self.tbt.misses(targets.tbt_ms))


def choose(
    board: Board, targets: Targets, prompt: Prompt, usable: Usable, prefill: PrefillScores, decode: DecodeScores
) -> Option:
    """The pair of smallest predicted TTFT that meets the targets; where none is found, the first one looked at."""
    rows = usable.prefills.copy()
    decoder: int | None = None
    if usable.split.any():
        decoder = least(decode.tbt, usable.decodes & decode.roomy, board)
        if decoder is None:
            decoder = least(decode.tbt, usable.decodes, board)
    first: Option | None = None
    for _ in range(TRIES):
        row = least(prefill.ttft, rows, board)
        if row is None:
            break
        partner = row if decoder is None or board.both[row] else decoder
        option = _option(board, prompt, prefill, row, partner)
        if option.meets(targets):
            return option
        first = first or option
        rows[row] = False
        if not board.both[row] and option.tbt.misses(targets.tbt_ms):
            rows &= usable.both  # the least loaded decode worker misses: another prefill worker will not mend that
    if first is None:
        raise ValueError("no row is usable: candidates.usable refuses such a request")
    return first


def _option(board: Board, prompt: Prompt, prefill: PrefillScores, row: int, partner: int) -> Option:
    ttft = Prediction(float(prefill.ttft[row]), float(prefill.high[row]), bool(prefill.sure[row]))
    step, context = step_at(board.workers[partner], partner, board, prompt, ttft.likely)
    spread, reach = float(board.step_spread[partner]), float(board.step_reach[partner])
    tbt = Prediction(step, step * (1.0 + spread), context <= reach)
    return Option(row, partner, float(prefill.wait[row]), ttft, tbt)


def missed(option: Option, targets: Targets, board: Board) -> Refusal:
    """Why ``option``, the best there is, does not do, and when to try again: once enough of the queue has drained."""
    parts, retry_s = [], MIN_RETRY_S
    if targets.ttft_ms is not None and option.ttft.misses(targets.ttft_ms):
        over_s = option.ttft.high - targets.ttft_ms / 1e3
        parts.append(
            f"predicted time to first token {option.ttft.likely * 1e3:.0f} ms (up to {option.ttft.high * 1e3:.0f} ms), "
            f"target {targets.ttft_ms:.0f} ms; {option.wait_s * 1e3:.0f} ms of it is waiting at {_name(board, option.prefill)}"
        )
        if over_s > option.wait_s:
            parts[-1] += ", and an idle worker would miss it too: raise the target or shorten the prompt"
        retry_s = max(retry_s, min(over_s, option.wait_s))
    if targets.tbt_ms is not None and option.tbt.misses(targets.tbt_ms):
        name = _name(board, option.decode)
        parts.append(
            f"predicted time between tokens {option.tbt.likely * 1e3:.0f} ms (up to {option.tbt.high * 1e3:.0f} ms) at {name}, "
            f"target {targets.tbt_ms:.0f} ms"
        )
        retry_s = max(retry_s, _first_departure_s(board, option))
    return Refusal(Reason.TARGETS_MISSED, "; ".join(parts), retry_s)


def _name(board: Board, row: int) -> str:
    return board.workers[row].member.id


def _first_departure_s(board: Board, option: Option) -> float:
    """Seconds until the next sequence reaches its last possible token at the decode worker."""
    left = [attempt.remaining_tokens for attempt in board.workers[option.decode].attempts]
    return min(left, default=0) * option.tbt.likely
