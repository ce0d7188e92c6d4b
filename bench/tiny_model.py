"""A random model small enough that a cluster of ten processes of it runs on one core: for tests, chaos and cancels."""

from __future__ import annotations

from pathlib import Path

TINY_IDS = 128
TINY_CONTEXT = 1024


def make_tiny_model(folder: Path, ids: int = TINY_IDS, context: int = TINY_CONTEXT) -> Path:
    """A random Llama: 2 layers, 4 query and 2 KV heads of 16, 128 ids, context 1,024. No end-of-sequence id."""
    import torch
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
    return _with_words(folder, ids)


def make_tiny_latent_model(folder: Path) -> Path:
    """A random DeepSeek-V2: 2 layers, the second one of experts, 4 heads over latents of 32 and a rotary key of 16. No
    end-of-sequence id."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(7)
    config = DeepseekV2Config(
        vocab_size=TINY_IDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=TINY_CONTEXT,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return _with_words(folder, TINY_IDS)


def _with_words(folder: Path, ids: int) -> Path:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(ids)}, unk_token="w0"))
    words.decoder = decoders.ByteLevel()  # the gateway serves tokenizers whose decoders go byte by byte
    words.save(str(folder / "tokenizer.json"))
    return folder
