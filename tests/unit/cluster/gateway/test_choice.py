from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.gateway.choice import Choice, Piece
from moonpool.cluster.gateway.detokenise import Detokeniser
from moonpool.core.request import FinishReason, Sampled

LEMON = "🍋".encode()
TABLE = {0: b"", 1: b"a", 2: b"b", 3: b"ab", 4: LEMON[:2], 5: LEMON[2:], 6: b"\n"}


def choice(*stops: str, min_tokens: int = 0) -> Choice:
    return Choice(Detokeniser(TABLE.__getitem__), stops=stops, min_tokens=min_tokens)


def run(one: Choice, ids: list[int], finish: FinishReason = FinishReason.LENGTH) -> list[Piece]:
    pieces = []
    for i, token in enumerate(ids):
        pieces.append(one.push(Sampled(token), finish if i == len(ids) - 1 else None))
        if pieces[-1].finish is not None:
            break
    return pieces


def text(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces)


def test_the_id_that_ends_the_sequence_counts_but_has_no_text() -> None:
    one = choice()
    pieces = run(one, [1, 2, 3], FinishReason.STOP)
    assert (text(pieces), one.tokens, pieces[-1].finish) == ("ab", 3, FinishReason.STOP)
    assert len([t for p in pieces for t in p.tokens]) == 2


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=12), stop=st.sampled_from(["ab", "ba", "aab", "bb"]))
def test_what_ended_the_answer_is_part_of_it_where_that_is_asked_for(ids: list[int], stop: str) -> None:
    for end in (FinishReason.LENGTH, FinishReason.STOP):
        one = Choice(Detokeniser(TABLE.__getitem__), stops=[stop], include_stop=True)
        said = "".join(TABLE[token].decode() for token in ids)
        at = said.find(stop)
        assert text(run(one, ids, end)) == (said if at < 0 else said[: at + len(stop)])


def test_a_length_end_inside_a_character_leaves_one_replacement() -> None:
    assert text(run(choice(), [1, 4])) == "a\ufffd"


def test_a_held_beginning_comes_out_when_the_answer_ends() -> None:
    assert text(run(choice("abb"), [1, 2])) == "ab"
    assert text(run(choice("abb"), [1, 2, 0], FinishReason.STOP)) == "ab"


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    one = choice("ba")
    pieces = run(one, [1, 2, 1, 2])
    assert (text(pieces), one.tokens, one.finish) == ("a", 3, FinishReason.STOP)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    assert run(choice("b"), [1, 2])[-1].finish is FinishReason.STOP


def test_a_stop_string_before_min_tokens_is_text() -> None:
    one = choice("a", min_tokens=3)
    assert (text(run(one, [1, 2, 2, 1, 2])), one.tokens) == ("abb", 4)


def test_log_probabilities_wait_with_their_text_and_vanish_with_the_stop_string() -> None:
    one = choice("ba")
    pieces = run(one, [1, 2, 2, 1])
    assert [[t.sampled.token for t in p.tokens] for p in pieces] == [[1], [], [2], []]
    assert [t.offset for p in pieces for t in p.tokens] == [0, 1]


def test_a_token_cut_in_the_middle_by_a_stop_string_keeps_its_log_probability() -> None:
    pieces = run(choice("b"), [3])
    assert text(pieces) == "a"
    assert [t.sampled.token for t in pieces[0].tokens] == [3]


@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=20), stops=st.lists(st.sampled_from(["ab", "ba", "\n"]), max_size=2)
)
def test_every_token_of_an_unstopped_answer_is_reported_once_in_order(ids: list[int], stops: list[str]) -> None:
    pieces = run(choice(*stops), ids)
    whole = b"".join(TABLE[i] for i in ids).decode(errors="replace")
    if not any(s in whole for s in stops):
        assert text(pieces) == whole
        assert [t.sampled.token for p in pieces for t in p.tokens] == ids
    else:
        assert pieces[-1].finish is FinishReason.STOP
        assert not any(s in text(pieces) for s in stops)
