"""Shapes of known models, by name."""

from __future__ import annotations

from functools import partial

from .llama import LlamaConfig

_llama3 = partial(LlamaConfig, kv_heads=8, vocab=128256, max_seq=8192, rope_theta=500_000.0)
_qwen3 = partial(
    LlamaConfig, kv_heads=8, vocab=151936, max_seq=32768, rope_theta=1e6, norm_eps=1e-6, head_width=128, qk_norm=True
)
_mixtral = partial(LlamaConfig, kv_heads=8, vocab=32000, max_seq=32768, rope_theta=1e6, experts=8)

SIZES: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=160),
    "small": LlamaConfig(dim=192, layers=4, heads=6, kv_heads=3, ffn_dim=512),
    "100m": LlamaConfig(dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048),
    "1b": LlamaConfig(dim=2048, layers=20, heads=16, kv_heads=8, ffn_dim=6144),
    "llama3-8b": _llama3(dim=4096, layers=32, heads=32, ffn_dim=14336),
    "llama3-70b": _llama3(dim=8192, layers=80, heads=64, ffn_dim=28672),
    "llama3-405b": _llama3(dim=16384, layers=126, heads=128, ffn_dim=53248),
    "qwen3-0.6b": _qwen3(dim=1024, layers=28, heads=16, ffn_dim=3072, tied=True),
    "qwen3-1.7b": _qwen3(dim=2048, layers=28, heads=16, ffn_dim=6144, tied=True),
    "qwen3-4b": _qwen3(dim=2560, layers=36, heads=32, ffn_dim=9728, tied=True),
    "qwen3-8b": _qwen3(dim=4096, layers=36, heads=32, ffn_dim=12288),
    "qwen3-14b": _qwen3(dim=5120, layers=40, heads=40, ffn_dim=17408),
    "qwen3-32b": _qwen3(dim=5120, layers=64, heads=64, ffn_dim=25600),
    "mixtral-8x7b": _mixtral(dim=4096, layers=32, heads=32, ffn_dim=14336),
    "mixtral-8x22b": _mixtral(dim=6144, layers=56, heads=48, ffn_dim=16384),
}
