"""Moonpool: a prefill/decode-disaggregated LLM serving cluster with one pooled KV store."""

__version__ = "0.1.0"
