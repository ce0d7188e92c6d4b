from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizer import SPECIALS, byte_alphabet, ids_of
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from moonpool.cluster.gateway.detokenise import Detokeniser, dangling_bytes
from moonpool.cluster.gateway.tokenizer import TokenTable
from moonpool.core.errors import UnsupportedModel

FAMILY = "👨\u200d👩\u200d👧"


@pytest.fixture(scope="session")
def backend(tiny_dir: Path) -> Backend:
    return Backend.from_file(str(tiny_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def table(backend: Backend) -> TokenTable:
    return TokenTable(backend)


def byte_ids(backend: Backend, raw: bytes) -> list[int]:
    """One id per byte."""
    alphabet = byte_alphabet()
    return [backend.token_to_id(alphabet[b]) for b in raw]


def deltas(table: TokenTable, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokeniser = Detokeniser(table.text_bytes, prompt or [])
    return [*map(detokeniser.push, ids), detokeniser.finish()]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_joined_pieces_equal_decoding_all_ids_at_once(backend: Backend, table: TokenTable, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=60))
    assert "".join(deltas(table, ids)) == backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(), cut=st.integers(0, 40))
def test_text_in_bytes_comes_back_whole_whatever_the_prompt_ends_in(
    backend: Backend, table: TokenTable, text: str, cut: int
) -> None:
    raw = text.encode()
    cut = min(cut, len(raw))
    prompt, rest = byte_ids(backend, raw[:cut]), byte_ids(backend, raw[cut:])
    whole_before = raw[:cut].decode(errors="ignore")
    assert "".join(deltas(table, rest, prompt)) == (text[len(whole_before) :] if rest else "")


@pytest.mark.parametrize(
    "scalars",
    [["e", "\u0301", "x"], ["'", "\ufe0f"], list(FAMILY), ["🇫", "🇷"]],
    ids=["accent", "variation selector", "joined family", "flag"],
)
def test_combining_characters_in_tokens_of_their_own(
    backend: Backend, table: TokenTable, tiny_dir: Path, scalars: list[str]
) -> None:
    ids = ids_of(tiny_dir, *scalars)
    assert len(ids) == len(scalars)
    got = deltas(table, ids)
    assert got[:-1] == scalars
    assert "".join(got).encode() == backend.decode(ids).encode()


def test_nothing_of_an_unfinished_prompt_character_appears_when_it_is_not_completed(
    backend: Backend, table: TokenTable
) -> None:
    prompt = byte_ids(backend, "Good morning 🍋".encode()[:-1])
    assert deltas(table, byte_ids(backend, b" hi"), prompt) == [" ", "h", "i", ""]


def test_a_prompt_character_is_completed_by_the_first_generated_bytes(backend: Backend, table: TokenTable) -> None:
    prompt = byte_ids(backend, "Good morning 🍋".encode()[:-2])
    assert deltas(table, byte_ids(backend, "🍋".encode()[-2:] + b"!"), prompt) == ["", "🍋", "!", ""]


def test_a_prompt_character_continued_and_then_broken_leaves_one_replacement(backend: Backend, table: TokenTable) -> None:
    raw = "🍋".encode()
    got = "".join(deltas(table, byte_ids(backend, raw[2:3] + b"!"), byte_ids(backend, raw[:2])))
    assert got == "\ufffd!"


def test_a_special_token_between_prompt_and_output_separates_them(backend: Backend, table: TokenTable) -> None:
    prompt = [*byte_ids(backend, "🍋".encode()[:3]), backend.token_to_id(SPECIALS[2])]
    assert dangling_bytes(table.text_bytes, prompt) == b""


def test_special_tokens_have_names_but_no_text(backend: Backend, table: TokenTable) -> None:
    end = backend.token_to_id("<|im_end|>")
    assert (table.text_bytes(end), table.name_bytes(end)) == (b"", b"<|im_end|>")
    assert table.text_bytes(10**6) == b""  # an id of the model without a token


def test_sentencepiece_spaces_and_byte_fallback_tokens() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x8D>": 4, "<0x8B>": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    table = TokenTable(backend)
    assert deltas(table, [1, 2, 3, 4, 5, 1]) == [" a", "", "", "", "🍋", " a", ""]


def test_an_unknown_way_of_decoding_is_refused_by_name() -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModel, match="CTC"):
        TokenTable(backend)
