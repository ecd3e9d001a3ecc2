"""A Llama-style language model, small enough to read at once, and the way we shard it.

Qwen3 is one whose queries and keys are normed; Mixtral one whose feed-forward is a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a :class:`Llama`.

    Attributes:
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        ffn_dim: inner width of the SwiGLU, of each if there are several.
        vocab: number of tokens; 256 means that a token is a byte.
        max_seq: longest sequence that forward accepts.
        rope_theta: base of the rotary frequencies.
        norm_eps: what RMSNorm adds to the mean square.
        tied: whether the output head is the embedding matrix.
        head_width: of a head, even, as rotary embeddings turn pairs; ``None``: ``dim / heads``.
        qk_norm: whether each head's queries and keys are normed.
        experts: SwiGLUs of a block, of which a router chooses for each token; 0: one, for all tokens.
        experts_per_token: that it chooses.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int = 256
    max_seq: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    head_width: int | None = None
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        if self.head_width is None and self.dim % self.heads or self.head_dim % 2:
            raise ValueError(f"dim {self.dim} must split into {self.heads} heads of an even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"{self.experts_per_token} of {self.experts} experts for a token")

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    def with_head(self, tied: bool) -> LlamaConfig:
        """The same shape with a tied or an untied head."""
        return replace(self, tied=tied)


class Llama(nn.Module):
    """Token ids to next-token logits.

    Build it on a device and it holds initial weights, those of seed 0. Build it under ``torch.device("meta")``, shard
    it, call ``to_empty`` and then :meth:`reset_parameters`, and no rank ever holds more than one whole parameter.

    Args:
        config: shape of the model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        # A tied head is a second use of the embedding's parameter, not a second owner of it: nothing can untie them.
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        if not self.embed.weight.is_meta:
            self.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at each position.

        Args:
            tokens: (B, T) int64, ``T <= config.max_seq``.

        Returns:
            Logits, (B, T, vocab), in the dtype of the parameters.
        """
        if tokens.size(1) > self.config.max_seq:
            raise ValueError(f"sequence of {tokens.size(1)} tokens is longer than max_seq {self.config.max_seq}")
        # Made anew in each forward: a buffer would need care on the meta device and would be cast with the model.
        cos, sin = rotary_tables(tokens.size(1), self.config, tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Set the initial weights: the same on any number of ranks, sharded or not.

        Each parameter is drawn whole from a generator of its own; a sharded one then keeps its shard. Weights that
        write to the residual stream start smaller, so that its variance does not grow with depth.
        """
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for index, (name, param) in enumerate(self.named_parameters()):
            full = torch.ones(param.shape, dtype=param.dtype, device=param.device)
            if "norm" not in name:
                writes_residual = name.removesuffix(".weight").endswith((".wo", ".down"))
                generator = torch.Generator(param.device).manual_seed(seed * 1_000_003 + index)
                full.normal_(std=residual_std if writes_residual else 0.02, generator=generator)
            if isinstance(param, DTensor):
                full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(full)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream: (B, T, dim) to (B, T, dim)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn = Experts(config) if config.experts else FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal attention with rotary positions, several query heads to a key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.is_grouped = config.heads != config.kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv)
        )  # (B, heads, T, head_dim)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.wo(x.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Mixture of SwiGLUs: each token goes to some of them, and gets the sum of their outputs, weighted by a router.

    No token is dropped, and shapes do not depend on the routing: rows are sorted by expert, and all experts' products
    are one grouped product, as in MegaBlocks (Gale et al., 2022). Scores are as Mixtral's (Jiang et al., 2024): softmax
    over those that are chosen. Products are computed in bfloat16, the dtype that torch has them in.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.count, self.chosen = config.experts, config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        # The experts' rows below each other, so that they shard evenly over more ranks than there are experts.
        self.gate = nn.Parameter(torch.empty(config.experts * config.ffn_dim, config.dim))
        self.up = nn.Parameter(torch.empty(config.experts * config.ffn_dim, config.dim))
        self.down = nn.Parameter(torch.empty(config.experts * config.dim, config.ffn_dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, experts = self.router(tokens).topk(self.chosen)  # (tokens, chosen), as are the rows below, flat
        weights = scores.softmax(-1, dtype=torch.float32).flatten()
        by_expert = experts.flatten().argsort(stable=True)
        ends = F.one_hot(experts.flatten(), self.count).sum(0).cumsum(0, dtype=torch.int32)
        rows = tokens[by_expert // self.chosen].bfloat16()
        rows = F.silu(self._product(rows, self.gate, ends)) * self._product(rows, self.up, ends)
        rows = self._product(rows, self.down, ends)[by_expert.argsort()]
        return (rows * weights[:, None]).unflatten(0, (-1, self.chosen)).sum(1).type_as(x).view_as(x)

    def _product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Each row times its expert's part of ``weight``, transposed; rows of expert ``i`` end before ``ends[i]``."""
        return F.grouped_mm(rows, weight.unflatten(0, (self.count, -1)).bfloat16().transpose(1, 2), offs=ends)


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer perceptron."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotary_tables(seq: int, config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: two float32 tensors of shape (seq, head_dim / 2)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    positions = torch.arange(seq, dtype=torch.float32, device=device)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(x[i], x[i + head_dim / 2])`` of ``x``, (B, heads, T, head_dim), by their position's angles.

    Returns the shape and dtype of ``x``, also where the tables are more precise.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def shard_llama(
    model: Llama,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
) -> Llama:
    """``fully_shard`` each block, then the root, which takes the embedding, the last norm and the head.

    Args:
        model: model to shard, in place; on the meta device or any other.
        mesh: ranks to shard over; default: all.
        reshard_after_forward: see ``fully_shard``.
        mp_policy: dtypes, the same for all blocks and the root.

    Returns:
        ``model``.
    """
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)
    return model
