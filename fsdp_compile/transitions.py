"""What is done to one parameter in each transition, as operators.

    all_gather:  sharded data ─ to device ─ cast ─ all_gather_into_tensor ─ wait ─ [concatenate] ─> full, with padding

    reduce:      gradient ─ cast ─ [add what was set aside] ─ [divide] ─ a row for each shard ─ reduce_scatter_tensor ─
                 wait ─ [add what was set aside] ─ [all_reduce ─ wait] ─ [divide] ─ cast ─ to device ─> gradient

The recipe says how far each goes. Run by the operators of ``group_ops``, traced by ``lowering``, and called by
``traced_ops`` for what bypasses the operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import passes, torch_compat
from .communication import WIRE_DTYPES
from .recipes import Recipe
from .set_aside import add_set_aside

c10d = torch.ops._c10d_functional


def all_gather(recipe: Recipe, data: torch.Tensor) -> torch.Tensor:
    """The unsharded data with padding, of the sharded ``data``."""
    # Cast on the device: a cast on the host would take the host's time, and leave what is not in pinned memory.
    source = data.to(recipe.device, non_blocking=True).to(recipe.compute_dtype)
    if recipe.gather_group is None:
        return source
    full = gather(source, recipe.world, recipe.gather_group)
    return torch.cat(full.chunk(recipe.world), dim=recipe.shard_dim) if recipe.shard_dim else full


def gather(source: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """All shards one after the other; sent as bytes if the transport might not know the dtype."""
    source = source.contiguous()
    sent = source if source.dtype in WIRE_DTYPES else source.view(torch.uint8)
    # In a graph it is the operator that everyone knows, which the passes replace where gloo cannot have it.
    launch = passes.GATHER if torch_compat.runs_eagerly(sent) else c10d.all_gather_into_tensor
    full = c10d.wait_tensor(launch(sent, world, group))
    return full if sent is source else full.view(source.dtype)


def reduce(
    recipe: Recipe, grad: torch.Tensor, unsharded_place: torch.Tensor | None, partial_place: torch.Tensor | None
) -> torch.Tensor:
    """Reduce an unsharded gradient: not at all, over the shard ranks, or over all data-parallel ranks."""
    source = grad.to(recipe.reduce_dtype)
    if recipe.syncs:
        source = _reduce_over_shards(recipe, source, unsharded_place)
        if recipe.all_reduces:
            source = _reduce_over_replicas(recipe, source, partial_place)
    return source.to(recipe.grad_dtype).to(recipe.grad_device)


def _reduce_over_shards(recipe: Recipe, source: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    if place is not None:
        source = add_set_aside(source, place)
    rows = _rows(recipe, source if recipe.pre == 1 else source / recipe.pre)
    if recipe.reduce_group is None:
        return rows
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(rows, recipe.op, recipe.world, recipe.reduce_group))


def _rows(recipe: Recipe, grad: torch.Tensor) -> torch.Tensor:
    """The shards of ``grad`` one after the other, padded, contiguous."""
    if recipe.shard_dim:
        grad = grad.unflatten(recipe.shard_dim, (recipe.world, -1)).movedim(recipe.shard_dim, 0).flatten(0, 1)
    elif recipe.padding:
        grad = F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, recipe.padding])
    return grad.contiguous()


def _reduce_over_replicas(recipe: Recipe, reduced: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    if place is not None:
        reduced = add_set_aside(reduced, place)
    if recipe.replicate_group is not None:
        reduced = c10d.wait_tensor(c10d.all_reduce(reduced, recipe.op, recipe.replicate_group))
    return reduced if recipe.post == 1 else reduced / recipe.post
