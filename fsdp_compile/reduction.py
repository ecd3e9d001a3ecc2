"""One group's gradients on their way: unsharded and local, reduced over the shard ranks, then over the replicas.

        pack ─ reduce-scatter (over shard ranks) ─ all-reduce (over replicas) ─ divide ─ sharded_param.grad

The two collectives are asynchronous: `advance` waits for one and goes on to the next, so that those of several groups
and the compute of the backward overlap.

All ranks pack the same parameters, those that require grad, whether or not each has a gradient on this rank. Otherwise
ranks that use different parameters would reduce buffers of different layouts: a hang, or sums of unrelated gradients.
An absent gradient is sent as zeros with a minus sign: x + -0.0 is x for every x, and only -0.0 + -0.0 is -0.0. So where
the result is -0.0 throughout, no rank had a gradient, and the parameter gets none; this takes no further communication.
A present gradient has -0.0 replaced by 0.0 in the first element of each shard, so that it cannot be taken for absent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from .communication import ReduceScatter
from .profiler_marks import mark_launch
from .sharded_layout import ShardedLayout
from .streams import Lane, Lanes, Ticket

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
class ReductionSettings:
    """How the user wants the gradients of a group to be reduced.

    Attributes:
        divide_factor: what to divide their sum by; ``None``: the number of data-parallel ranks.
        force_sum: reduce with sums only.
        separate_group: a group of the shard ranks apart from the all-gathers', or ``None``.
        reduce_grads: whether backward reduces gradients; if not, they are set aside unsharded.
        all_reduce_grads: whether it also reduces them over replicas; if not, they are set aside as partial.
        has_accumulated, has_kept_partial: whether the user has ever wanted gradients to be set aside so.
    """

    divide_factor: float | None = None
    force_sum: bool = False
    separate_group: dist.ProcessGroup | None = None
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    has_accumulated: bool = False
    has_kept_partial: bool = False


@dataclass
class Route:
    """Where a group's gradients go; read when a reduction starts.

    Attributes:
        name: of the group's module.
        shard_group, replicate_group: ``None`` where gradients are not reduced over such ranks.
        comm: the reduce-scatter and its buffers.
        hook: the user's, on the reduced gradients, with the lane that it runs in.
        all_reduce: if not, the gradients stay on the parameters as partial, reduced over the shard ranks only.
    """

    name: str
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    scaling: Scaling
    comm: ReduceScatter
    lanes: Lanes
    hook: Callable[[torch.Tensor], None] | None
    hook_lane: Lane
    all_reduce: bool


@dataclass
class Gradient:
    """One parameter's part in a reduction.

    Attributes:
        local: the unsharded gradient of this rank, or ``None``.
        partial: what earlier backwards have reduced over the shard ranks only, flat and padded, or ``None``.
        always: whether the parameter gets a gradient even if no rank has one.
    """

    param: FSDPParam
    local: torch.Tensor | None
    partial: torch.Tensor | None
    always: bool

    @property
    def is_present(self) -> bool:
        return self.always or self.local is not None or self.partial is not None


class Reduction:
    """The reduction of ``gradients``, in the group's order, all in ``dtype``."""

    @torch.no_grad()
    def __init__(self, gradients: list[Gradient], dtype: torch.dtype, route: Route) -> None:
        self._params = [gradient.param for gradient in gradients]
        self._partials = [gradient.partial for gradient in gradients]
        self._present = [gradient.is_present for gradient in gradients]
        self._sizes = [param.layout.padded_sharded_numel for param in self._params]
        self._route = route
        self._source: torch.Tensor | None = self._pack(gradients, dtype)
        # Memory of the reduce-scatter lane, which later steps use in other lanes: kept until all are done.
        self._reduced: torch.Tensor | None = None
        steps = self._steps()
        self._tickets = iter(list(steps)) if route.lanes.in_streams else steps
        self._under_way: Ticket | None = next(self._tickets)
        if not route.lanes.in_streams:
            self._source = None  # the work holds what it needs

    @torch.no_grad()
    def advance(self) -> bool:
        """Wait for the collective under way and go on to the next; returns whether all is done."""
        self.wait()
        self._source = None
        self._under_way = next(self._tickets, None)
        if self._under_way is None:
            self._reduced = None
        return self._under_way is None

    def finish(self) -> None:
        """Take all steps that are left."""
        while not self.advance():
            pass

    def wait(self) -> None:
        """Wait for the collective under way; its buffers are then no longer in use."""
        if self._under_way is not None:
            self._under_way.wait()

    @property
    def _world_size(self) -> int:
        return 1 if self._route.shard_group is None else self._route.shard_group.size()

    def _pack(self, gradients: list[Gradient], dtype: torch.dtype) -> torch.Tensor:
        """A row for each shard rank: its part of each gradient."""
        rows, columns = self._world_size, sum(self._sizes)
        source = self._route.comm.allocate((rows * columns,), dtype=dtype, device=self._params[0].device)
        table = source.view(rows, columns)
        for gradient, part in zip(gradients, table.split(self._sizes, dim=1), strict=True):
            if gradient.local is not None:
                _pack(gradient.local, part, gradient.param.layout)
                gradient.local = None  # its memory is not needed any more
            else:
                part.fill_(0.0 if gradient.is_present else -0.0)
        _mark_present(table, self._sizes, self._present)
        if self._route.scaling.pre != 1:
            # Of complex numbers the real and imaginary parts: complex division does not keep the sign of zero.
            (torch.view_as_real(source) if source.is_complex() else source).div_(self._route.scaling.pre)
        return source

    def _steps(self) -> Iterator[Ticket]:
        """The tickets of the collectives, each issued when the one before is done (CPU) or ordered after it."""
        route, lanes = self._route, self._route.lanes
        lane, ticket, reduced = self._reduce_scatter()
        self._reduced = reduced
        yield ticket
        with lane.on():
            for part, partial in zip(reduced.split(self._sizes), self._partials, strict=True):
                if partial is not None:
                    part.add_(partial)
            if not route.all_reduce:
                for param, part in self._with_gradient(reduced, self._present_on_any_rank(reduced)):
                    param.add_partial_grad(part)
                return
        if route.replicate_group is not None and route.replicate_group.size() > 1:
            with lane.on():
                lanes.all_reduce.catch_up()
            lane, group = lanes.all_reduce, route.replicate_group
            mark_launch("all_reduce", route.name, "backward")
            yield lane.run(lambda async_op: dist.all_reduce(reduced, OPS[route.scaling.op], group, async_op))
        with lane.on():
            present = self._present_on_any_rank(reduced)  # before a hook may change the signs of zeros
        if route.hook is not None:
            with lane.on():
                route.hook_lane.catch_up()
            lane = route.hook_lane
            with lane.on():
                route.hook(reduced)
        with lane.on():
            if route.scaling.post != 1:
                reduced.div_(route.scaling.post)
            for param, part in self._with_gradient(reduced, present):
                param.accumulate_sharded_grad(part)
        if lanes.in_streams:
            yield lane.mark()

    def _reduce_scatter(self) -> tuple[Lane, Ticket, torch.Tensor]:
        """Start it; the lane, its ticket and the output, 1-D: this rank's part of the gradients."""
        route, source, lane = self._route, self._source, self._route.lanes.reduce_scatter
        assert source is not None
        lane.catch_up()
        group = route.shard_group
        if group is None or self._world_size == 1:
            with lane.on():
                reduced = source.clone() if route.lanes.in_streams else source
            return lane, lane.mark(), reduced
        with lane.on():
            size = (source.numel() // self._world_size,)
            reduced = route.comm.allocate(size, dtype=source.dtype, device=source.device)
        op = OPS[route.scaling.op]
        mark_launch("reduce_scatter", route.name, "backward")
        return lane, lane.run(lambda async_op: route.comm(reduced, source, group, op, async_op)), reduced

    def _present_on_any_rank(self, reduced: torch.Tensor) -> list[bool]:
        """Which parameters some rank had a gradient of; looks at the data of those only that this rank had none of."""
        parts = reduced.split(self._sizes)
        return [here or not _is_absent(part) for here, part in zip(self._present, parts, strict=True)]

    def _with_gradient(self, reduced: torch.Tensor, present: list[bool]) -> Iterator[tuple[FSDPParam, torch.Tensor]]:
        """The parameters that have a gradient, each with its part of ``reduced``."""
        for param, part, has_grad in zip(self._params, reduced.split(self._sizes), present, strict=True):
            if has_grad:
                yield param, part


def _mark_present(table: torch.Tensor, sizes: list[int], present: list[bool]) -> None:
    """Add 0.0 to the first column of each gradient that is present, which only turns -0.0 into 0.0."""
    starts = [0, *itertools.accumulate(sizes)]
    columns = [start for start, size, here in zip(starts, sizes, present, strict=False) if size and here]
    if columns:
        torch._foreach_add_([table.select(1, column) for column in columns], 0.0)


def _is_absent(part: torch.Tensor) -> bool:
    part = part.real if part.is_complex() else part  # of a complex number only the real part is given the sign
    return bool((torch.signbit(part) & (part == 0)).all())


def _pack(grad: torch.Tensor, part: torch.Tensor, layout: ShardedLayout) -> None:
    """Copy ``grad`` into ``part`` of shape (world, padded shard numel), a row a shard: cast and pad in one copy."""
    if layout.shard_dim:
        shards = grad.unflatten(layout.shard_dim, (layout.world_size, -1)).movedim(layout.shard_dim, 0)
        part.unflatten(1, layout.padded_sharded_size).copy_(shards)
        return
    flat, width = grad.reshape(-1), part.size(1)
    full_rows, rest = divmod(flat.numel(), width) if width else (0, 0)
    part[:full_rows].copy_(flat[: full_rows * width].view(full_rows, width))
    if full_rows < part.size(0):
        part[full_rows:].zero_()
        if rest:
            part[full_rows, :rest].copy_(flat[full_rows * width :])
