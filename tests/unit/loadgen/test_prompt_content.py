from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moonpool.core.errors import ConfigError
from moonpool.loadgen.plan import PlannedSend
from moonpool.loadgen.prompts import DEFAULT_TOKEN_RANGE, PromptMaker, block_symbols, token_alphabet, word_alphabet

SIZE = DEFAULT_TOKEN_RANGE[1] - DEFAULT_TOKEN_RANGE[0]


def planned(tokens: int, ids: tuple[int, ...], block: int, loop: int = 0) -> PlannedSend:
    return PlannedSend(0, 0.0, tokens, 1, ids, block, 1, loop)


def test_two_hundred_thousand_blocks_have_no_duplicate_even_in_their_first_two_tokens() -> None:
    assert len({block_symbols(i, 2, SIZE).tobytes() for i in range(200_000)}) == 200_000


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.sampled_from([1_000, SIZE, 151_000]), st.integers(0, 5))
def test_ids_of_any_size_differ_as_soon_as_their_spelling_does(a: int, b: int, size: int, salt: int) -> None:
    digits = next(n for n in range(1, 9) if size**n > max(a, b))
    same = np.array_equal(block_symbols(a, digits, size, salt), block_symbols(b, digits, size, salt))
    assert same == (a == b)


@given(st.integers(0, 2**63 - 1), st.integers(1, 80), st.integers(1, 80), st.integers(0, 2**40))
def test_a_short_block_is_a_prefix_of_a_longer_one_and_all_symbols_are_in_range(a: int, n: int, m: int, salt: int) -> None:
    short, long = sorted((n, m))
    whole = block_symbols(a, long, 1_003, salt)
    assert np.array_equal(block_symbols(a, short, 1_003, salt), whole[:short])
    assert whole.min() >= 0
    assert whole.max() < 1_003


def test_content_is_the_same_on_every_machine() -> None:
    assert block_symbols(12_345, 8, SIZE).tolist() == [14953, 2316, 30407, 25771, 10880, 17339, 22567, 5682]


def test_another_salt_gives_another_prompt_from_the_first_token_on() -> None:
    firsts = {int(block_symbols(0, 1, SIZE, salt)[0]) for salt in range(50)}
    assert len(firsts) == 50


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6), st.integers(1, 16))
def test_the_prompt_sent_has_exactly_the_planned_length(ids: list[int], rest: int) -> None:
    tokens = (len(ids) - 1) * 16 + rest
    prompt = json.loads(PromptMaker(token_alphabet()).json_prompt(planned(tokens, tuple(ids), 16)))
    assert len(prompt) == tokens
    assert all(DEFAULT_TOKEN_RANGE[0] <= t < DEFAULT_TOKEN_RANGE[1] for t in prompt)


def test_prompts_share_exactly_the_blocks_whose_ids_agree() -> None:
    maker = PromptMaker(token_alphabet())
    a = json.loads(maker.json_prompt(planned(40, (1, 2, 3), 16)))
    b = json.loads(maker.json_prompt(planned(48, (1, 2, 4), 16)))
    assert a[:32] == b[:32]
    assert a[32] != b[32]


def test_loops_repeat_their_prompts_unless_asked_for_fresh_ones() -> None:
    first, second = planned(40, (1, 2, 3), 16), planned(40, (1, 2, 3), 16, loop=1)
    same, fresh = PromptMaker(token_alphabet()), PromptMaker(token_alphabet(), fresh_loops=True)
    assert same.json_prompt(first) == same.json_prompt(second) == fresh.json_prompt(first)
    assert json.loads(fresh.json_prompt(second))[0] != json.loads(fresh.json_prompt(first))[0]


def test_a_range_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_range"):
        token_alphabet((1_000, 1_500))


def test_text_without_a_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        word_alphabet(tmp_path)


@pytest.mark.model
def test_text_prompts_tokenise_to_exactly_the_planned_length(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    maker = PromptMaker(word_alphabet(model_dir))
    for index in range(300):
        ids = tuple(range(7 * index, 7 * index + 1 + index % 5))
        tokens = (len(ids) - 1) * 64 + 1 + (index * 13) % 64
        prompt = json.loads(maker.json_prompt(planned(tokens, ids, 64)))
        assert len(tokenizer.encode(prompt).ids) == tokens


@pytest.mark.model
def test_text_blocks_are_distinct_and_joining_keeps_their_tokens(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    alphabet = word_alphabet(model_dir)
    maker = PromptMaker(alphabet)
    seen = {block_symbols(i, 16, len(alphabet.pieces)).tobytes() for i in range(50_000)}
    assert len(seen) == 50_000
    one = tokenizer.encode(json.loads(maker.json_prompt(planned(64, (5,), 64)))).ids
    two = tokenizer.encode(json.loads(maker.json_prompt(planned(128, (5, 6), 64)))).ids
    assert two[:64] == one
