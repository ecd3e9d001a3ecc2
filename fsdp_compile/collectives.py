"""What a transition emits: in eager a gather under way; traced, graph nodes for the gather and for its reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import torch_compat
from .mesh_info import FSDPMeshInfo
from .tracing import read_recipe, tagged

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam

c10d = torch.ops._c10d_functional


# -- eager ------------------------------------------------------------------------------------------------------------


class Gather(NamedTuple):
    """An all-gather under way. ``inputs`` are kept alive until it is done."""

    inputs: list[torch.Tensor]
    work: dist.Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def launch_all_gather(params: Sequence[FSDPParam], mesh_info: FSDPMeshInfo) -> Gather:
    """Start one all-gather for all ``params``, straight into each one's all-gather output: no copy in, no copy out."""
    inputs = [param.all_gather_input() for param in params]
    # `.data` has a version counter of its own: what autograd saved of the output before it was freed stays valid.
    outputs = [param.alloc_all_gather_output().data for param in params]
    if mesh_info.shard_mesh_size == 1:
        for output, source in zip(outputs, inputs, strict=True):
            output.view(-1).copy_(source.view(-1))
        return Gather(inputs, None)
    flat_outputs, flat_inputs = [t.view(-1) for t in outputs], [t.view(-1) for t in inputs]
    return Gather(inputs, torch_compat.all_gather_coalesced(mesh_info.shard_process_group, flat_outputs, flat_inputs))


# -- traced -----------------------------------------------------------------------------------------------------------


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
