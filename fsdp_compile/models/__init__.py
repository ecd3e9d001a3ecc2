"""Models to train, plan and test with."""

from .llama import Llama, LlamaConfig, shard_llama
from .sizes import SIZES

__all__ = ["SIZES", "Llama", "LlamaConfig", "shard_llama"]
