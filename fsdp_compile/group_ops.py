"""The transitions of a whole group as one operator each: all that AOTAutograd traces, so large models compile quickly.

    unshard(shards ...)   -> for each the unsharded data with padding
    reduce(gradients ...) -> for each the gradient of its shard
    free(unsharded ...)      nothing; from here on none of them holds data

Before the passes run, ``lowering`` writes each out into the collectives, or the ``resize_``, of each parameter. Where
none of our passes run, the first two run as they are, and the third is not traced: the backward would not gather again.
Results never share memory with arguments, so these are for parameters that some collective or cast gives memory of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import torch_compat, transitions
from .recipes import Recipe, read_recipes

_library = torch.library.Library("fsdp_compile", "FRAGMENT")
_library.define("unshard(Tensor[] shards, str recipes, str[] tags, int[] which) -> Tensor[]")
_library.define(
    "reduce(Tensor[] grads, Tensor?[] unsharded_places, Tensor?[] partial_places, str recipes, str[] tags, int[] which)"
    " -> Tensor[]"
)
# By its schema it leaves the tensors as they are: those that mutate some AOTAutograd rewrites into others that do not.
_library.define("free(Tensor[] made, str[] tags) -> ()")

UNSHARD = torch.ops.fsdp_compile.unshard.default
REDUCE = torch.ops.fsdp_compile.reduce.default
FREE = torch.ops.fsdp_compile.free.default
torch.fx.node.has_side_effect(FREE)  # so that it is not taken for dead


def _members(*arguments: Any) -> Iterator[tuple[Any, ...]]:
    """Of the arguments of an operator, for each parameter its recipe and its tensors."""
    *tensors, recipes, _, which = arguments
    read = read_recipes(recipes)
    return zip([read[index] for index in which], *tensors, strict=True)


@torch.library.impl(_library, "unshard", "CompositeExplicitAutograd")
def _unshard(*arguments: Any) -> list[torch.Tensor]:
    return [transitions.all_gather(*member) for member in _members(*arguments)]


@torch.library.register_fake("fsdp_compile::unshard", lib=_library)
def _(*arguments: Any) -> list[torch.Tensor]:
    return [_like_unsharded(*member) for member in _members(*arguments)]


def _like_unsharded(recipe: Recipe, shard: torch.Tensor) -> torch.Tensor:
    size = list(shard.size())
    if recipe.gather_group is not None:
        size[recipe.shard_dim] *= recipe.world
    return shard.new_empty(size, dtype=recipe.compute_dtype, device=recipe.device)


@torch.library.impl(_library, "reduce", "CompositeExplicitAutograd")
def _reduce(*arguments: Any) -> list[torch.Tensor]:
    return [transitions.reduce(*member) for member in _members(*arguments)]


@torch.library.register_fake("fsdp_compile::reduce", lib=_library)
def _(*arguments: Any) -> list[torch.Tensor]:
    return [_like_reduced(recipe, grad) for recipe, grad, *_ in _members(*arguments)]


def _like_reduced(recipe: Recipe, grad: torch.Tensor) -> torch.Tensor:
    size = list(grad.size())
    size[recipe.shard_dim] = (size[recipe.shard_dim] + recipe.padding) // recipe.world
    return grad.new_empty(size, dtype=recipe.grad_dtype, device=recipe.grad_device)


@torch.library.impl(_library, "free", "CompositeExplicitAutograd")
def _free(made: list[torch.Tensor], tags: list[str]) -> None:
    for tensor in made:
        torch_compat.resize_storage(tensor, 0)


@torch.library.register_fake("fsdp_compile::free", lib=_library)
def _(made: list[torch.Tensor], tags: list[str]) -> None:
    pass
