"""The open-loop scheduler: one task that lets every send go at its planned time, whatever became of the ones before.

Times are absolute, so waking late never shifts what follows: a late wake-up sends everything that is due at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.loadgen.clock import Clock

_AHEAD = 16  # sends made ready before their time
_QUIET_S = 0.003  # only get ready where there is this much time left
_BURST = 64  # sends between two chances for other tasks to run


async def drive(
    at: Sequence[float],
    send: Callable[[int], None],
    clock: Clock,
    *,
    start: float,
    prepare: Callable[[int], None] = lambda index: None,
) -> None:
    """Call ``send(i)`` at ``start + at[i]`` for every i, in order; ``at`` never decreases.

    ``send`` must not block: it starts a task. ``prepare(i)`` is called at most once per i, before its time and only
    when the scheduler is idle; a send that came due first is not prepared. Cancelling the task ends it between sends.
    """
    prepared = 0
    burst = 0
    for index, planned in enumerate(at):
        while (wait := start + planned - clock.now()) > 0:
            burst = 0
            prepared = max(prepared, index)
            if wait > _QUIET_S and prepared < min(index + _AHEAD, len(at)):
                prepare(prepared)
                prepared += 1
                await clock.sleep(0)
            else:
                await clock.sleep(wait)
        send(index)
        burst += 1
        if burst % _BURST == 0:
            await clock.sleep(0)
