from __future__ import annotations

import pytest

from moonpool.cluster.gateway.limits import Limits, output_tokens
from moonpool.core.errors import ContextLength, PromptTooLarge

L = 1_000


def room(prompt: int, wanted: int | None = None, *, default: int | None = None, largest: int = L) -> int:
    limits = Limits(context=L, prompt=largest)
    return output_tokens(limits, prompt, wanted, default=default, prompt_field="prompt", tokens_field="max_tokens")


@pytest.mark.parametrize(
    ("prompt", "wanted", "field"),
    [(L - 5, 10, "max_tokens"), (5, 10 * L, "max_tokens"), (L, None, "prompt"), (L + 1, None, "prompt"), (L, 1, "prompt")],
)
def test_what_does_not_fit_is_refused_with_all_three_numbers(prompt: int, wanted: int | None, field: str) -> None:
    with pytest.raises(ContextLength) as e:
        room(prompt, wanted)
    for number in (prompt, wanted or 1, L):
        assert str(number) in e.value.message
    assert e.value.param == field
    assert e.value.http_status == 400


def test_one_token_of_room_is_one_token_of_output() -> None:
    assert room(L - 1) == 1
    assert room(L - 1, default=16) == 1
    assert room(L - 1, 1) == 1


def test_without_a_wish_the_default_or_all_the_room() -> None:
    assert room(10, default=16) == 16
    assert room(10) == L - 10


def test_a_prompt_no_prefill_worker_can_hold_is_too_large_at_once() -> None:
    with pytest.raises(PromptTooLarge, match=r"510.*500"):
        room(510, 1, largest=500)
    assert room(500, 1, largest=500) == 1
