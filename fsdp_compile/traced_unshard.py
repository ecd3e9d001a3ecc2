"""What unsharding emits into a graph: the all-gather of one parameter, with the reduction as its backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .tracing import read_recipe, tagged

c10d = torch.ops._c10d_functional


class UnshardFunction(torch.autograd.Function):
    """Sharded data to unsharded parameter; the backward is the averaging reduce-scatter.

        forward:   sharded data ─ cast ─ all_gather_into_tensor ─ wait ─ slice off the padding ─> unsharded parameter
        backward:  unsharded gradient ─ cast ─ pad ─ reduce_scatter_tensor ─ wait ─ cast ─> gradient of the sharded data

    In float16, or with a divide factor of the user's, there is a division before or after the reduction.
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, recipe: str) -> torch.Tensor:
        rows, padding, compute_dtype, world, group_name = read_recipe(recipe, "unshard")
        ctx.orig_dtype, ctx.recipe = shard.dtype, recipe
        source = shard if shard.dtype == compute_dtype else shard.to(compute_dtype)
        full = c10d.wait_tensor(c10d.all_gather_into_tensor(source, world, group_name))
        return full[:rows] if padding else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        padding, reduce_dtype, pre, op, post, world, group_name = read_recipe(ctx.recipe, "reduce")
        with tagged(ctx.recipe, "reduce"):
            source = grad if grad.dtype == reduce_dtype else grad.to(reduce_dtype)
            source = source if pre == 1 else source / pre
            if padding:
                source = F.pad(source, [0, 0] * (source.dim() - 1) + [0, padding])
            reduced = c10d.wait_tensor(c10d.reduce_scatter_tensor(source.contiguous(), op, world, group_name))
            reduced = reduced if post == 1 else reduced / post
            reduced = reduced if reduced.dtype == ctx.orig_dtype else reduced.to(ctx.orig_dtype)
        return reduced, None
