from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.cluster.gateway.stops import StopMatcher

small_text = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text ends: before the longest of the stop strings that end first. Tried character by character."""
    for end in range(len(text) + 1):
        hits = [len(s) for s in stops if text[:end].endswith(s)]
        if hits:
            return end - max(hits)
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    return max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)


def broken(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@given(text=small_text, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="Robin! Robin Robin: x", stops=["\n", "Robin:"], cuts=[1, 2, 5, 7])
def test_any_pieces_give_the_text_up_to_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    given_out, stopped = "", False
    for piece in broken(text, cuts):
        safe, stopped = matcher.push(piece)
        given_out += safe
        if stopped:
            break
    cut = first_stop(text, stops)
    assert stopped == (cut is not None)
    assert given_out + ("" if stopped else matcher.finish()) == (text if cut is None else text[:cut])


@given(text=small_text, stops=stop_lists.filter(bool))
def test_only_what_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, so_far, out = StopMatcher(stops), "", ""
    for char in text:
        so_far += char
        safe, stopped = matcher.push(char)
        out += safe
        if stopped:
            return
        assert len(so_far) - len(out) == longest_beginning(so_far, stops)


def test_a_begun_stop_string_that_does_not_complete_loses_and_repeats_nothing() -> None:
    matcher = StopMatcher(["\n", "Robin:"])
    pieces = ["Hey ", "Rob", "in", "! ", "R", "obin", " and ", "Robin", ":", " gone"]
    out = []
    for piece in pieces:
        safe, stopped = matcher.push(piece)
        out.append(safe)
        if stopped:
            break
    assert "".join(out) == "Hey Robin! Robin and "
    assert out[1] == ""  # held: it might have become "Robin:"


def test_a_stop_string_completed_too_early_is_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == ("xab", False)
    assert matcher.push("ab") == ("", True)


def test_of_stop_strings_that_end_together_the_longest_is_removed() -> None:
    assert StopMatcher(["b", "aab"]).push("caab") == ("c", True)


def test_the_stop_string_that_ends_first_wins() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", True)
