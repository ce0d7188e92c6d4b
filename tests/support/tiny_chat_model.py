"""A random Llama that chats: byte-level tokenizer, chat template, end-of-sequence ids; greedy, it babbles bytes."""

from __future__ import annotations

from pathlib import Path

from support.tiny_tokenizer import EOS, TURN_END, ids_of, write_tiny_model

CHAT_CONTEXT = 2_048


def make_tiny_chat_model(folder: Path) -> Path:
    """2 layers, 4 query and 2 KV heads of 16, a few hundred ids."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tiny_model(folder, context=CHAT_CONTEXT)
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CHAT_CONTEXT,
        bos_token_id=None,
        eos_token_id=ids_of(folder, TURN_END, EOS),
        pad_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
