"""The operations that a transition emits: as asynchronous work in eager, as functional graph nodes when traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import torch_compat
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


def launch_all_gather(params: Sequence[FSDPParam], group: dist.ProcessGroup) -> Gather:
    """Start one all-gather for all ``params``, straight into each one's all-gather output: no copy in, no copy out."""
    inputs = [param.all_gather_input() for param in params]
    # `.data` has a version counter of its own: what autograd saved of the output before it was freed stays valid.
    outputs = [param.alloc_all_gather_output().data for param in params]
    if group.size() == 1:
        for output, source in zip(outputs, inputs, strict=True):
            output.copy_(source)
        return Gather(inputs, None)
    return Gather(inputs, torch_compat.all_gather_coalesced(group, outputs, inputs))


class Reduction(NamedTuple):
    """A reduce-scatter under way: ``output`` holds, in turn, the padded shards of the gradients of ``params``."""

    params: list[FSDPParam]
    source: torch.Tensor  # kept alive until the work is done
    output: torch.Tensor
    work: dist.Work | None

    def finish(self) -> None:
        """Wait, then hand each parameter its reduced gradient."""
        if self.work is not None:
            self.work.wait()
        sizes = [param.padded_sharded_numel for param in self.params]
        for param, reduced in zip(self.params, self.output.split(sizes), strict=True):
            param.accumulate_sharded_grad(reduced)


@torch.no_grad()
def launch_reduce_scatter(
    params: list[FSDPParam], grads: list[torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> Reduction:
    """Start one averaging reduce-scatter of ``grads``, packed as ``(world size, padded shard numels)`` in ``dtype``."""
    world = group.size()
    sizes = [param.padded_sharded_numel for param in params]
    source = torch.empty(world, sum(sizes), dtype=dtype, device=params[0].device)
    for grad, column in zip(grads, source.split(sizes, dim=1), strict=True):
        pack(grad, column)
    if world == 1:
        return Reduction(params, source, source.view(-1), None)
    output = source.new_empty(sum(sizes))
    work = dist.reduce_scatter_tensor(output, source.view(-1), dist.ReduceOp.AVG, group, async_op=True)
    return Reduction(params, source, output, work)


def pack(grad: torch.Tensor, column: torch.Tensor) -> None:
    """Copy ``grad`` row by row into ``column`` of shape (world, padded shard numel): cast and pad in one copy."""
    flat, width = grad.reshape(-1), column.size(1)
    full_rows, rest = divmod(flat.numel(), width) if width else (0, 0)
    column[:full_rows].copy_(flat[: full_rows * width].view(full_rows, width))
    if full_rows < column.size(0):
        column[full_rows:].zero_()
        if rest:
            column[full_rows, :rest].copy_(flat[full_rows * width :])


# -- traced -----------------------------------------------------------------------------------------------------------


class UnshardFunction(torch.autograd.Function):
    """Sharded data to unsharded parameter; the backward is the averaging reduce-scatter.

        forward:   sharded data ─ cast ─ all_gather_into_tensor ─ wait ─ slice off the padding ─> unsharded parameter
        backward:  unsharded gradient ─ cast ─ pad ─ reduce_scatter_tensor ─ wait ─ cast ─> gradient of the sharded data
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, recipe: str) -> torch.Tensor:
        rows, padding, compute_dtype, _, world, group_name = read_recipe(recipe)
        ctx.orig_dtype, ctx.recipe = shard.dtype, recipe
        source = shard if shard.dtype == compute_dtype else shard.to(compute_dtype)
        full = c10d.wait_tensor(c10d.all_gather_into_tensor(source, world, group_name))
        return full[:rows] if padding else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        _, padding, _, reduce_dtype, world, group_name = read_recipe(ctx.recipe)
        with tagged(ctx.recipe, "reduce"):
            source = grad if grad.dtype == reduce_dtype else grad.to(reduce_dtype)
            if padding:
                source = F.pad(source, [0, 0] * (source.dim() - 1) + [0, padding])
            reduced = c10d.reduce_scatter_tensor(source.contiguous(), "avg", world, group_name)
            reduced = c10d.wait_tensor(reduced)
            if reduced.dtype != ctx.orig_dtype:
                reduced = reduced.to(ctx.orig_dtype)
        return reduced, None
