"""Ids of texts whose beginnings were tokenised before are those of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizer import SPECIALS, TURN_END, byte_alphabet, write_tiny_model
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from moonpool.cluster.gateway import known_texts
from moonpool.cluster.gateway.known_texts import KnownTexts, cuts_cleanly
from moonpool.cluster.gateway.tokenizer import Tokenizer, TokenTable

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
KINDS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
}
PIECES = (
    *SPECIALS,
    "the",
    " ing",
    "stop",
    "'ll",
    "'",
    "l",
    " ",
    "  ",
    "\n",
    "\r\n",
    "7",
    "1234",
    "é",
    "e\u0301",
    "👨\u200d👩",
    "!",
    "<|im_",
    "x" * 40,
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=60).map(
    "".join
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("known texts"))


def backend(home: Path, kind: str = "gpt-2") -> Backend:
    made = Backend.from_file(str(home / "tokenizer.json"))
    made.pre_tokenizer = KINDS[kind]
    return made


def plain(made: Backend) -> Callable[..., list[int]]:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return made.encode(text, add_special_tokens=add_special_tokens).ids

    return encode


def remembering(made: Backend, most: int = 1_000) -> KnownTexts:
    return KnownTexts(made, plain(made), TokenTable(made).name_bytes, most)


@pytest.fixture
def small_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_texts, "STRIDE_BYTES", 64)
    monkeypatch.setattr(known_texts, "MARGIN_BYTES", 24)


@pytest.mark.usefixtures("small_strides")
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_that_it_has_without_a_memory_whatever_was_tokenised_before(home: Path, kind: str) -> None:
    made = backend(home, kind)
    known, reference = remembering(made), plain(made)

    @settings(max_examples=60, deadline=None)
    @given(beginning=TEXTS, ends=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
    def check(beginning: str, ends: list[str], special: bool) -> None:
        for end in ends:
            text = beginning + end
            assert known.encode(text, add_special_tokens=special) == reference(text, add_special_tokens=special)

    check()
    assert len(known)


@pytest.mark.usefixtures("small_strides")
@pytest.mark.parametrize(
    ("pattern", "run", "ends"),
    [(LLAMA_3, ("\n", " "), ("x", "\n")), (BY_CASE, ("ª", "B"), (" ", "b"))],
    ids=["spaces", "capitals"],
)
def test_runs_of_like_characters_longer_than_the_margin_are_one_word_or_two_by_what_ends_them(
    pattern: str, run: tuple[str, str], ends: tuple[str, str]
) -> None:
    """Where they are one, what began the run has an id together with the character after it."""
    alphabet = byte_alphabet()
    first, then = alphabet[run[0].encode()[-1]], alphabet[run[1].encode()[0]]
    vocab = {name: i for i, name in enumerate((*alphabet.values(), first + then))}
    made = Backend(models.BPE(vocab=vocab, merges=[(first, then)]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])
    made.decoder = decoders.ByteLevel()
    assert cuts_cleanly(made)
    for length in range(20, 60):
        texts = [f"the moon is a {run[0]}{run[1] * length}{end}{'the moon ' * 9}" for end in ends]
        for before, text in (texts, texts[::-1]):
            known = remembering(made)
            known.encode(before)
            assert known.encode(text) == plain(made)(text), f"{length} of them"


@pytest.mark.usefixtures("small_strides")
def test_only_what_a_known_conversation_adds_is_tokenised(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(home)
    known, turn = remembering(made), "the moon is a stone that is far away. "
    known.encode(turn * 20)
    tokenised: list[str] = []
    monkeypatch.setattr(known, "_backend", Noting(made, tokenised))
    assert known.encode(turn * 20 + "and then?") == plain(made)(turn * 20 + "and then?")
    assert sum(map(len, tokenised)) < 2 * known_texts.STRIDE_BYTES


class Noting:
    def __init__(self, made: Backend, texts: list[str]) -> None:
        self._made, self._texts = made, texts

    def encode(self, text: str, add_special_tokens: bool) -> object:
        self._texts.append(text)
        return self._made.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.usefixtures("small_strides")
def test_no_more_strides_are_kept_than_wanted(home: Path) -> None:
    known = remembering(backend(home), most=3)
    for word in ("the", "ing", "stop", "Robin"):
        known.encode(f"{word} " * 60)
    assert len(known) == 3


def test_a_chat_is_tokenised_through_the_memory_and_stays_what_it_was(home: Path) -> None:
    tokenizer, untouched = Tokenizer.load(home), Tokenizer.load(home)
    untouched._library.encode = type(untouched._library).encode.__get__(untouched._library)
    told = [
        {"role": "user", "content": f"the stop {TURN_END} of 12 'll " * 200},
        {"role": "assistant", "content": "ing " * 900},
    ]
    for turns in (told[:1], told, [*told, {"role": "user", "content": "and?"}]):
        assert tokenizer.encode_chat(turns) == untouched.encode_chat(turns)
    assert len(tokenizer._library.encode.__self__) > 0


def test_half_a_surrogate_pair_is_refused_as_before(home: Path) -> None:
    made = backend(home)
    with pytest.raises((UnicodeEncodeError, TypeError)):
        plain(made)("\ud800" * 3_000)
    with pytest.raises((UnicodeEncodeError, TypeError)):
        remembering(made).encode("\ud800" * 3_000)


def test_tokenizers_that_look_to_the_left_of_a_word_have_no_memory(home: Path) -> None:
    assert all(cuts_cleanly(backend(home, kind)) for kind in KINDS)
    spaced, normal, left, greedy, twice = (backend(home) for _ in range(5))
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    normal.normalizer = normalizers.NFC()
    left.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(?<!a)\w+"), "isolated"), BYTES])
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    twice.pre_tokenizer = pre_tokenizers.Sequence([KINDS["llama-3"], KINDS["gpt-2"]])
    assert not any(cuts_cleanly(made) for made in (spaced, normal, left, greedy, twice))
