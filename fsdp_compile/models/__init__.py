"""Models to train, plan and test with."""

from .llama import SIZES, Llama, LlamaConfig, shard_llama

__all__ = ["SIZES", "Llama", "LlamaConfig", "shard_llama"]
