"""A model directory without weights: a byte-level tokenizer of a few hundred ids, a chat template, a small context."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = "<s>", "</s>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, TURN, TURN_END)
CONTEXT = 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Whole characters and words that are one id each; every other byte is an id of its own.
WHOLE = ("é", "\u0301", "\ufe0f", "\u200d", "👨", "👩", "👧", "🇫", "🇷", "Robin", "the", "ing", "stop")


def byte_alphabet() -> dict[int, str]:
    """Byte to the character that stands for it in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(rest)}


def write_tiny_model(folder: Path, *, context: int = CONTEXT) -> Path:
    """Files that a gateway reads: tokenizer, template, config. The tokenizer adds BOS, and so does the template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    vocab = {name: i for i, name in enumerate((*SPECIALS, *alphabet.values()))}
    merges: list[tuple[str, str]] = []
    for word in WHOLE:
        chars = [alphabet[b] for b in word.encode()]
        left = chars[0]
        for char in chars[1:]:
            if left + char not in vocab:
                vocab[left + char] = len(vocab)
                merges.append((left, char))
            left += char
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": TURN_END})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    facts = {"model_type": "llama", "max_position_embeddings": context, "vocab_size": len(vocab)}
    (folder / "config.json").write_text(json.dumps({**facts, "eos_token_id": [vocab[TURN_END], vocab[EOS]]}))
    return folder


def ids_of(folder: Path, *texts: str) -> list[int]:
    """Ids of each text on its own, joined, without BOS: how a test writes what a model says, piece by piece."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]
