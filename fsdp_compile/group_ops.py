"""The transitions of a whole group as two operators: that is all AOTAutograd traces, so large models compile quickly.

    unshard(shards ...)   -> for each the unsharded data with padding
    reduce(gradients ...) -> for each the gradient of its shard

Before the passes run, ``lowering`` writes each out into the collectives of each parameter. Where none of our passes
run, the operators run as they are. Results never share memory with arguments, so these are for parameters that some
collective or cast gives memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import transitions
from .recipes import Recipe, read_recipes

_library = torch.library.Library("fsdp_compile", "FRAGMENT")
_library.define("unshard(Tensor[] shards, str recipes, str[] tags, int[] which) -> Tensor[]")
_library.define(
    "reduce(Tensor[] grads, Tensor?[] unsharded_places, Tensor?[] partial_places, str recipes, str[] tags, int[] which)"
    " -> Tensor[]"
)

UNSHARD = torch.ops.fsdp_compile.unshard.default
REDUCE = torch.ops.fsdp_compile.reduce.default


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
