"""What workers are asked to obey grows with the protocol only: protobuf lets an older one skip a field without a word."""

from __future__ import annotations

from moonpool.core.membership import PROTOCOL
from moonpool.wire import pb

OBEYED = {
    3: {
        "Request": "id prompt sampling namespace keys targets tenant turn kind priority weight adapter",
        "Adapter": "name digest",
        "Attempt": "request number emitted deadline_ms siblings",
        "Sibling": "id number seed",
        "Sampling": "max_tokens temperature top_p top_k repetition_penalty presence_penalty frequency_penalty seed "
        "stop_token_ids ignore_eos min_tokens logprobs min_p logit_bias prompt_logprobs guide",
        "LogitBias": "token bias",
        "Guide": "kind text",
    }
}


def test_a_field_that_workers_must_obey_comes_with_a_new_protocol() -> None:
    known = {name: {field.name for field in getattr(pb.types, name).DESCRIPTOR.fields} for name in OBEYED[PROTOCOL]}
    assert known == {name: set(fields.split()) for name, fields in OBEYED[PROTOCOL].items()}, (
        "count core/membership.PROTOCOL up, say in docs/upgrades.md what came with it, and list the fields here"
    )
