"""Parameters that were ``DTensor`` s, in graphs: the unsharded one is a ``DTensor`` again, its gradient a plain tensor.

    unsharded data ─ unsharded_dtensor ─> DTensor                       a view
    gradient, local <─ sharded_layout.local_gradient ─ gradient, DTensor

``DTensor.from_local`` is not enough: its backward brings a gradient to placements chosen in the forward. Over
data-parallel dimensions the gradient has to be left as it is found, which is known only when the backward is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import torch_compat
from .sharded_layout import local_gradient


@torch_compat.one_node
def unsharded_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    size: torch.Size,
    data_parallel_dims: Sequence[int],
) -> torch.Tensor:
    """``local`` as a ``DTensor`` of ``size`` in all; its backward is ``local_gradient``.

    Like ``local``, it may require grad without grad mode too.
    """
    with torch.enable_grad():
        return UnshardedDTensor.apply(local, mesh, tuple(placements), size, data_parallel_dims)


class UnshardedDTensor(torch.autograd.Function):
    """See ``unsharded_dtensor``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        size: torch.Size,
        data_parallel_dims: Sequence[int],
    ) -> torch.Tensor:
        ctx.placements, ctx.data_parallel_dims = placements, data_parallel_dims
        spec = torch_compat.contiguous_spec(mesh, placements, size, local.dtype)
        return torch_compat.dtensor_of(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return local_gradient(grad, ctx.placements, ctx.data_parallel_dims), None, None, None, None
