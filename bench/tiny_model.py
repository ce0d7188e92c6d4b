"""A random model small enough that a cluster of ten processes of it runs on one core: for tests, chaos and cancels."""

from __future__ import annotations

from pathlib import Path

TINY_IDS = 128
TINY_CONTEXT = 1024


def make_tiny_model(folder: Path, ids: int = TINY_IDS, context: int = TINY_CONTEXT) -> Path:
    """A random Llama: 2 layers, 4 query and 2 KV heads of 16, 128 ids, context 1,024. No end-of-sequence id."""
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=ids,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(ids)}, unk_token="w0"))
    words.decoder = decoders.ByteLevel()  # the gateway serves tokenizers whose decoders go byte by byte
    words.save(str(folder / "tokenizer.json"))
    return folder
