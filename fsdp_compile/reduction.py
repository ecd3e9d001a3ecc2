"""One group's gradients on their way: unsharded and local, reduced over the shard ranks, then over the replicas.

        pack ─ reduce-scatter (over shard ranks) ─ all-reduce (over replicas) ─ divide ─ sharded_param.grad

Each arrow is asynchronous: `advance` waits for one step and starts the next, so that the steps of several groups and
the compute of the backward overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam

OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}


class Scaling(NamedTuple):
    """How a gradient is averaged: divide by ``pre``, reduce with ``op``, divide by ``post``."""

    pre: float
    op: str
    post: float


def scaling_for(dtype: torch.dtype, ranks: int, factor: float | None, force_sum: bool) -> Scaling:
    """Choose the scaling of a reduction in ``dtype`` over ``ranks`` data-parallel ranks.

    Args:
        factor: what to divide the sum by; ``None`` means ``ranks``.
        force_sum: use only sums, as some transports need.

    In float16 a sum over many ranks can overflow and a small gradient divided by many ranks can vanish, so the
    division is split into about equal halves before and after the reduction (as in torch's DistributedDataParallel
    communication hooks and FSDP).
    """
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        average = factor is None and not force_sum and ranks > 1
        return Scaling(1.0, "avg", 1.0) if average else Scaling(1.0, "sum", float(ranks if factor is None else factor))
    whole = float(ranks if factor is None else factor)
    pre = 1.0
    while whole % pre == 0 and whole / pre > pre:
        pre *= 2
    return Scaling(pre, "sum", whole / pre)


@dataclass
class Route:
    """Where a group's gradients go; read when a reduction starts."""

    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    scaling: Scaling
    hook: Callable[[torch.Tensor], None] | None  # the user's, on the reduced gradients
    all_reduce: bool  # if not, the gradients stay on the params as partial, reduced over the shard ranks only


class Reduction:
    """The reduction of the gradients of ``params``, all in one dtype.

    Args:
        params: in the group's order.
        grads: unsharded gradients; ``None`` for a parameter whose only gradient is an earlier partial one.
        dtype: what to reduce in.
        route: through which groups.
    """

    @torch.no_grad()
    def __init__(
        self, params: list[FSDPParam], grads: list[torch.Tensor | None], dtype: torch.dtype, route: Route
    ) -> None:
        self.params = params
        self._route = route
        world = route.shard_group.size()
        self._source = torch.empty(world, sum(self._sizes), dtype=dtype, device=params[0].device)
        for grad, column in zip(grads, self._source.split(self._sizes, dim=1), strict=True):
            _pack(grad, column)
        if route.scaling.pre != 1:
            self._source.div_(route.scaling.pre)
        self._work: dist.Work | None = None
        self._output = self._source.view(-1)
        if world > 1:
            self._output = self._source.new_empty(sum(self._sizes))
            op = OPS[route.scaling.op]
            self._work = dist.reduce_scatter_single(
                self._output, self._source.view(-1), op, route.shard_group, async_op=True
            )
        self._step = self._after_reduce_scatter

    @property
    def _sizes(self) -> list[int]:
        return [param.padded_sharded_numel for param in self.params]

    def advance(self) -> bool:
        """Wait for the step under way and start the next; returns whether all is done."""
        self.wait()
        return self._step()

    def finish(self) -> None:
        """Take all steps that are left."""
        while not self.advance():
            pass

    def wait(self) -> None:
        """Wait for the step under way; its buffers are then no longer in use."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @torch.no_grad()
    def _after_reduce_scatter(self) -> bool:
        del self._source
        pieces = self._output.split(self._sizes)
        if not self._route.all_reduce:
            for param, piece in zip(self.params, pieces, strict=True):
                param.add_partial_grad(piece)
            return True
        for param, piece in zip(self.params, pieces, strict=True):
            partial = param.take_partial_grad()
            if partial is not None:
                piece.add_(partial)
        group = self._route.replicate_group
        if group is None or group.size() == 1:
            return self._after_all_reduce()
        self._work = dist.all_reduce(self._output, OPS[self._route.scaling.op], group, async_op=True)
        self._step = self._after_all_reduce
        return False

    @torch.no_grad()
    def _after_all_reduce(self) -> bool:
        if self._route.hook is not None:
            self._route.hook(self._output)
        if self._route.scaling.post != 1:
            self._output.div_(self._route.scaling.post)
        for param, reduced in zip(self.params, self._output.split(self._sizes), strict=True):
            param.accumulate_sharded_grad(reduced)
        return True


def _pack(grad: torch.Tensor | None, column: torch.Tensor) -> None:
    """Copy ``grad`` row by row into ``column`` of shape (world, padded shard numel): cast and pad in one copy."""
    if grad is None:
        column.zero_()
        return
    flat, width = grad.reshape(-1), column.size(1)
    full_rows, rest = divmod(flat.numel(), width) if width else (0, 0)
    column[:full_rows].copy_(flat[: full_rows * width].view(full_rows, width))
    if full_rows < column.size(0):
        column[full_rows:].zero_()
        if rest:
            column[full_rows, :rest].copy_(flat[full_rows * width :])
