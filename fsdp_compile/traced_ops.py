"""What the transitions put into graphs: each function is one node for Dynamo, and for AOTAutograd what it does.

    unshard:  sharded data ─ cast ─ all_gather_into_tensor ─ wait ─ [concatenate] ─ [slice off the padding] ─> full

    backward of full:  gradient ─ cast ─┬─ [add what was set aside] ─ a row for each shard ─ reduce_scatter_tensor ─ ...
                                        └─> set aside, without gradient sync

        ... ─ wait ─┬─ [add what was set aside] ─ [all_reduce ─ wait] ─ [divide] ─ cast ─> gradient of the sharded data
                    └─> set aside, without all-reduce

    free:     resize of full's memory to zero bytes

Dynamo does not look inside, so a model of many parameters is traced quickly. ``inputs`` are the tensors of one group;
the recipes say what each is, and the tags what the nodes of each parameter carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import torch_compat
from .communication import WIRE_DTYPES
from .recipes import Recipe, read_recipes
from .set_aside import add_set_aside
from .tracing import tagged

c10d = torch.ops._c10d_functional


Tensors = Sequence[torch.Tensor]


@torch_compat.one_node
def unshard(
    recipes: str, tags: Sequence[str], inputs: Tensors, which: Sequence[int], trains: Sequence[bool]
) -> list[torch.Tensor]:
    """All-gather the parameters ``which`` of a group; ``trains`` says of each of the group whether it requires grad.

    Returns:
        The unsharded data of each, and then, of those that are padded, the data with padding. A flat list without
        aliases of the same data, because each tensor that a node returns costs Dynamo time.
    """
    read = read_recipes(recipes)
    padded = [_all_gather(read[index], tags[index], inputs[read[index].data]) for index in which]
    return [_unshard(read[i], tags[i], inputs, trains[i], data) for i, data in zip(which, padded, strict=True)] + [
        data for index, data in zip(which, padded, strict=True) if read[index].padding
    ]


def memory_to_free(recipes: Sequence[Recipe], inputs: Tensors) -> tuple[tuple[int, ...], ...]:
    """For each parameter where among what ``unshard`` of all returns there is memory that may be freed after use."""
    padded = itertools.count(len(recipes))
    places = [next(padded) if recipe.padding else index for index, recipe in enumerate(recipes)]
    return tuple((i,) if _makes_memory(r, inputs[r.data]) else () for i, r in zip(places, recipes, strict=True))


def _makes_memory(recipe: Recipe, data: torch.Tensor) -> bool:
    return recipe.gather_group is not None or (data.device, data.dtype) != (recipe.device, recipe.compute_dtype)


def _unshard(recipe: Recipe, tag: str, inputs: Tensors, trains: bool, padded: torch.Tensor) -> torch.Tensor:
    full = padded
    if recipe.padding:
        with tagged(tag, "unshard"), torch_compat.below_autograd():
            full = padded[: recipe.rows]
    return _with_reduction(recipe, tag, inputs, full) if trains else full


def _all_gather(recipe: Recipe, tag: str, data: torch.Tensor) -> torch.Tensor:
    """The unsharded data with padding, which does not require grad."""
    with tagged(tag, "unshard"), torch_compat.below_autograd():
        source = data.to(device=recipe.device, dtype=recipe.compute_dtype)
        if recipe.gather_group is None:
            return source if _makes_memory(recipe, data) else data.detach()
        full = _gather(source, recipe.world, recipe.gather_group)
        return torch.cat(full.chunk(recipe.world), dim=recipe.shard_dim) if recipe.shard_dim else full


@torch_compat.one_node
def gather(recipes: str, index: int, tag: str, source: torch.Tensor) -> torch.Tensor:
    """All-gather one of the tensors that an extension sends for parameter ``index``."""
    recipe = read_recipes(recipes)[index]
    with tagged(tag, "unshard"), torch_compat.below_autograd():
        return source if recipe.gather_group is None else _gather(source, recipe.world, recipe.gather_group)


def _gather(source: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """All shards one after the other; sent as bytes if the transport might not know the dtype."""
    if source.dtype in WIRE_DTYPES:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(source.contiguous(), world, group))
    sent = source.contiguous().view(torch.uint8)
    return c10d.wait_tensor(c10d.all_gather_into_tensor(sent, world, group)).view(source.dtype)


@torch_compat.one_node
def with_reduction(recipes: str, index: int, tag: str, inputs: Tensors, full: torch.Tensor) -> torch.Tensor:
    """The unsharded data ``full`` of parameter ``index`` as it is; its backward reduces the gradient."""
    return _with_reduction(read_recipes(recipes)[index], tag, inputs, full)


def _with_reduction(recipe: Recipe, tag: str, inputs: Tensors, full: torch.Tensor) -> torch.Tensor:
    """It requires grad without grad mode too, as parameters do: some operators choose their kernels by it.

    The gather is not inside, because AOTAutograd gives the backward of a function the tags of its forward.
    """
    positions = (recipe.target, recipe.unsharded_place, recipe.partial_place)
    with torch.enable_grad():
        taken = [None if position is None else inputs[position] for position in positions]
        return Unsharded.apply(recipe, tag, full, *taken)


class Unsharded(torch.autograd.Function):
    """The unsharded data ``full`` as it is; the gradient of ``target`` is the reduction of its gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        recipe: Recipe,
        tag: str,
        full: torch.Tensor,
        target: torch.Tensor,
        unsharded_place: torch.Tensor | None,
        partial_place: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.tag, ctx.dtype, ctx.device = recipe, tag, target.dtype, target.device
        ctx.save_for_backward(unsharded_place, partial_place)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with tagged(ctx.tag, "reduce"), torch_compat.below_autograd():
            reduced = _reduce(ctx.recipe, grad, *ctx.saved_tensors)
            reduced = reduced.to(dtype=ctx.dtype, device=ctx.device)
        return None, None, None, reduced, None, None


def _reduce(
    recipe: Recipe, grad: torch.Tensor, unsharded_place: torch.Tensor | None, partial_place: torch.Tensor | None
) -> torch.Tensor:
    """As far as the recipe goes: not at all, over the shard ranks, or over all data-parallel ranks."""
    source = grad.to(recipe.reduce_dtype)
    if not recipe.syncs:
        return source
    if unsharded_place is not None:
        source = add_set_aside(source, unsharded_place)
    source = source if recipe.pre == 1 else source / recipe.pre
    reduced = _rows(recipe, source)
    if recipe.reduce_group is not None:
        reduced = c10d.wait_tensor(c10d.reduce_scatter_tensor(reduced, recipe.op, recipe.world, recipe.reduce_group))
    if not recipe.all_reduces:
        return reduced
    if partial_place is not None:
        reduced = add_set_aside(reduced, partial_place)
    if recipe.replicate_group is not None:
        reduced = c10d.wait_tensor(c10d.all_reduce(reduced, recipe.op, recipe.replicate_group))
    return reduced if recipe.post == 1 else reduced / recipe.post


def _rows(recipe: Recipe, grad: torch.Tensor) -> torch.Tensor:
    """The shards of ``grad`` one after the other, padded, contiguous."""
    if recipe.shard_dim:
        grad = grad.unflatten(recipe.shard_dim, (recipe.world, -1)).movedim(recipe.shard_dim, 0).flatten(0, 1)
    elif recipe.padding:
        grad = F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, recipe.padding])
    return grad.contiguous()


@torch_compat.one_node
def free(tags: Sequence[str], made: Tensors, owned: Sequence[Sequence[int]]) -> None:
    """Record that the memory of those of ``made`` that each parameter has ``owned`` holds no data from here on."""
    for tag, some in zip(tags, owned, strict=True):
        with tagged(tag, "reshard"), torch_compat.below_autograd():
            for index in some:
                torch_compat.record_free(made[index])


@torch_compat.one_node
def keep_slices(
    recipes: str, tags: Sequence[str], inputs: Tensors, made: Tensors, owned: Sequence[Sequence[int]]
) -> None:
    """Take a slice of what each parameter has ``owned`` of ``made`` for the gather of the backward, among fewer ranks.

    It is chosen by a tensor and not by a number, which would be another constant on each rank. Nothing in the graph
    reads it yet: a pass does, by the tag. Until then the wait keeps it from being taken for dead.
    """
    for recipe, tag, (index,) in zip(read_recipes(recipes), tags, owned, strict=True):
        assert recipe.slice is not None and recipe.slice_index is not None
        rows = made[index].detach().reshape(recipe.slice[0], -1)
        with tagged(tag, "reshard", slice=list(recipe.slice)), torch_compat.below_autograd():
            c10d.wait_tensor(rows.index_select(0, inputs[recipe.slice_index]))
