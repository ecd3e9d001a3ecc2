"""The transitions of a whole group as two operators: that is all AOTAutograd traces, so large models compile quickly.

    unshard(shards ...)   -> for each the unsharded data with padding
    reduce(gradients ...) -> for each the gradient of its shard

Before the passes run, ``lowering`` writes each out into the collectives of each parameter. Where none of our passes
run, the operators run as they are. Results never share memory with arguments, so these are for parameters that some
collective or cast gives memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

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

Tensors = Sequence[torch.Tensor]
Places = Sequence[torch.Tensor | None]


@torch.library.impl(_library, "unshard", "CompositeExplicitAutograd")
def _unshard(shards: Tensors, recipes: str, tags: Sequence[str], which: Sequence[int]) -> list[torch.Tensor]:
    read = read_recipes(recipes)
    return [transitions.all_gather(read[i], shard) for i, shard in zip(which, shards, strict=True)]


@torch.library.register_fake("fsdp_compile::unshard", lib=_library)
def _(shards: Tensors, recipes: str, tags: Sequence[str], which: Sequence[int]) -> list[torch.Tensor]:
    read = read_recipes(recipes)
    return [_like_unsharded(read[i], shard) for i, shard in zip(which, shards, strict=True)]


def _like_unsharded(recipe: Recipe, shard: torch.Tensor) -> torch.Tensor:
    size = list(shard.size())
    if recipe.gather_group is not None:
        size[recipe.shard_dim] *= recipe.world
    return shard.new_empty(size, dtype=recipe.compute_dtype, device=recipe.device)


@torch.library.impl(_library, "reduce", "CompositeExplicitAutograd")
def _reduce(
    grads: Tensors,
    unsharded_places: Places,
    partial_places: Places,
    recipes: str,
    tags: Sequence[str],
    which: Sequence[int],
) -> list[torch.Tensor]:
    read = read_recipes(recipes)
    places = zip(unsharded_places, partial_places, strict=True)
    return [transitions.reduce(read[i], grad, *of) for i, grad, of in zip(which, grads, places, strict=True)]


@torch.library.register_fake("fsdp_compile::reduce", lib=_library)
def _(
    grads: Tensors,
    unsharded_places: Places,
    partial_places: Places,
    recipes: str,
    tags: Sequence[str],
    which: Sequence[int],
) -> list[torch.Tensor]:
    read = read_recipes(recipes)
    return [_like_reduced(read[i], grad) for i, grad in zip(which, grads, strict=True)]


def _like_reduced(recipe: Recipe, grad: torch.Tensor) -> torch.Tensor:
    size = list(grad.size())
    size[recipe.shard_dim] = (size[recipe.shard_dim] + recipe.padding) // recipe.world
    return grad.new_empty(size, dtype=recipe.grad_dtype, device=recipe.grad_device)
