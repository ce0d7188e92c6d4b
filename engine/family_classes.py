"""The classes of which the library builds a model of each known family, and how that family differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe


@dataclass(frozen=True, slots=True)
class Family:
    """Classes of one family, and in which of the few ways it differs from Llama."""

    model: type
    decoder: type
    layer: type
    attention: type
    mlp: type
    norm: type
    rotary: type
    embedding: type = nn.Embedding
    one_more: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # what attention and MLP add is normed first
    rotary_kinds: bool = False  # angles by the layer's type
    sparse: Sparse | None = None  # layers may have experts


@dataclass(frozen=True, slots=True)
class Sparse:
    """Classes of an MLP of experts. ``shared``: one more that all tokens go through, weighed by a gate of its own."""

    block: type
    router: type
    experts: type
    shared: bool = False


FAMILIES = (
    Family(
        llama.LlamaForCausalLM,
        llama.LlamaModel,
        llama.LlamaDecoderLayer,
        llama.LlamaAttention,
        llama.LlamaMLP,
        llama.LlamaRMSNorm,
        llama.LlamaRotaryEmbedding,
    ),
    Family(
        mistral.MistralForCausalLM,
        mistral.MistralModel,
        mistral.MistralDecoderLayer,
        mistral.MistralAttention,
        mistral.MistralMLP,
        mistral.MistralRMSNorm,
        mistral.MistralRotaryEmbedding,
    ),
    Family(
        qwen2.Qwen2ForCausalLM,
        qwen2.Qwen2Model,
        qwen2.Qwen2DecoderLayer,
        qwen2.Qwen2Attention,
        qwen2.Qwen2MLP,
        qwen2.Qwen2RMSNorm,
        qwen2.Qwen2RotaryEmbedding,
    ),
    Family(
        qwen3.Qwen3ForCausalLM,
        qwen3.Qwen3Model,
        qwen3.Qwen3DecoderLayer,
        qwen3.Qwen3Attention,
        qwen3.Qwen3MLP,
        qwen3.Qwen3RMSNorm,
        qwen3.Qwen3RotaryEmbedding,
    ),
    Family(
        gemma.GemmaForCausalLM,
        gemma.GemmaModel,
        gemma.GemmaDecoderLayer,
        gemma.GemmaAttention,
        gemma.GemmaMLP,
        gemma.GemmaRMSNorm,
        gemma.GemmaRotaryEmbedding,
        gemma.GemmaTextScaledWordEmbedding,
        one_more=True,
    ),
    Family(
        gemma2.Gemma2ForCausalLM,
        gemma2.Gemma2Model,
        gemma2.Gemma2DecoderLayer,
        gemma2.Gemma2Attention,
        gemma2.Gemma2MLP,
        gemma2.Gemma2RMSNorm,
        gemma2.Gemma2RotaryEmbedding,
        gemma2.Gemma2TextScaledWordEmbedding,
        one_more=True,
        post_norms=True,
    ),
    Family(
        gemma3.Gemma3ForCausalLM,
        gemma3.Gemma3TextModel,
        gemma3.Gemma3DecoderLayer,
        gemma3.Gemma3Attention,
        gemma3.Gemma3MLP,
        gemma3.Gemma3RMSNorm,
        gemma3.Gemma3RotaryEmbedding,
        gemma3.Gemma3TextScaledWordEmbedding,
        one_more=True,
        post_norms=True,
        rotary_kinds=True,
    ),
    Family(
        qwen3_moe.Qwen3MoeForCausalLM,
        qwen3_moe.Qwen3MoeModel,
        qwen3_moe.Qwen3MoeDecoderLayer,
        qwen3_moe.Qwen3MoeAttention,
        qwen3_moe.Qwen3MoeMLP,
        qwen3_moe.Qwen3MoeRMSNorm,
        qwen3_moe.Qwen3MoeRotaryEmbedding,
        sparse=Sparse(qwen3_moe.Qwen3MoeSparseMoeBlock, qwen3_moe.Qwen3MoeTopKRouter, qwen3_moe.Qwen3MoeExperts),
    ),
    Family(
        qwen2_moe.Qwen2MoeForCausalLM,
        qwen2_moe.Qwen2MoeModel,
        qwen2_moe.Qwen2MoeDecoderLayer,
        qwen2_moe.Qwen2MoeAttention,
        qwen2_moe.Qwen2MoeMLP,
        qwen2_moe.Qwen2MoeRMSNorm,
        qwen2_moe.Qwen2MoeRotaryEmbedding,
        sparse=Sparse(qwen2_moe.Qwen2MoeSparseMoeBlock, qwen2_moe.Qwen2MoeTopKRouter, qwen2_moe.Qwen2MoeExperts, shared=True),
    ),
    Family(
        mixtral.MixtralForCausalLM,
        mixtral.MixtralModel,
        mixtral.MixtralDecoderLayer,
        mixtral.MixtralAttention,
        mixtral.MixtralSparseMoeBlock,  # every layer has experts
        mixtral.MixtralRMSNorm,
        mixtral.MixtralRotaryEmbedding,
        sparse=Sparse(mixtral.MixtralSparseMoeBlock, mixtral.MixtralTopKRouter, mixtral.MixtralExperts),
    ),
)
