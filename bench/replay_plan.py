"""A slice of a Mooncake trace as a plan for a small machine: when each request goes out, and with how many tokens. Pure.

Every hash block becomes ``block_tokens`` prompt tokens, a partly filled last one, too; prompts are cut at ``most_tokens``;
outputs are divided, and have two tokens at least, so that every answer has a time per token. The requests of one timestamp
(the published traces have one every 3 s) go out evenly over the gap to the next; then all times are stretched so that the
slice has the wanted mean rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moonpool.core.errors import ConfigError
from moonpool.loadgen.plan import Plan, PlannedSend, Scaling, plan_sends
from moonpool.loadgen.trace import Trace

BLOCK_TOKENS = 32
OUTPUT_DIVISOR = 16
MOST_TOKENS = 8_000


def plan_at(
    trace: Trace,
    rate: float,
    requests: int,
    *,
    block_tokens: int = BLOCK_TOKENS,
    output_divisor: int = OUTPUT_DIVISOR,
    most_tokens: int = MOST_TOKENS,
) -> Plan:
    """The first ``requests`` rows at ``rate`` requests/s on average. ConfigError: a slice without any span, or no rate."""
    if not rate > 0:
        raise ConfigError(f"rate: {rate} is out of range; use requests per second above 0", param="rate")
    found = plan_sends(trace, Scaling(block_tokens=block_tokens, output_divisor=output_divisor, limit=requests, spread=True))
    if found.span_s <= 0:
        raise ConfigError("requests: the slice of the trace has no span to stretch; use more requests", param="requests")
    stretch = len(found.sends) / rate / found.span_s
    return Plan(tuple(_cut(send, stretch, block_tokens, most_tokens) for send in found.sends), found.outputs_raised)


def prompt_tokens(sends: Sequence[PlannedSend]) -> int:
    return sum(send.input_tokens for send in sends)


def _cut(send: PlannedSend, stretch: float, block_tokens: int, most_tokens: int) -> PlannedSend:
    return replace(
        send,
        at_s=send.at_s * stretch,
        input_tokens=min(len(send.hash_ids) * block_tokens, most_tokens),
        output_tokens=max(send.output_tokens, 2),
    )
