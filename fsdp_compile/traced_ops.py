"""What the transitions put into graphs: each function is one node for Dynamo, and for AOTAutograd what it does.

    unshard:        the operator ``group_ops.UNSHARD`` for all parameters of a group ─ [slice off the padding] ─> full
    its backward:   gradients ─> the operator ``group_ops.REDUCE`` ─> gradients of the sharded data
    free:           the operator ``group_ops.FREE`` for all memory of a group that holds unsharded data

Parameters that no collective and no cast gives memory of its own, and gradients that are not reduced, bypass the
operators. Dynamo does not look inside, so a model of many parameters is traced quickly. ``inputs`` are the tensors of
one group; the recipes say what each is, and the tags what the nodes of each parameter carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import torch_compat, transitions
from .group_ops import FREE, REDUCE, UNSHARD
from .recipes import Recipe, read_recipes
from .tracing import tagged

c10d = torch.ops._c10d_functional

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


@torch_compat.one_node
def unshard(
    recipes: str, tags: Sequence[str], inputs: Tensors, which: Sequence[int], trains: Sequence[bool]
) -> list[torch.Tensor]:
    """All-gather the parameters ``which`` of a group; ``trains`` says of each of the group whether it requires grad.

    Those require grad without grad mode too, as parameters do: some operators choose their kernels by it.

    Returns:
        The unsharded data of each, and then, of those that are padded, the data with padding. A flat list without
        aliases of the same data, because each tensor that a node returns costs Dynamo time.
    """
    if not any(trains[index] for index in which):
        return _unshard(recipes, tags, inputs, which)
    with torch.enable_grad():
        return list(Unsharded.apply(recipes, tuple(tags), tuple(which), tuple(trains), *inputs))


def _unshard(recipes: str, tags: Sequence[str], inputs: Tensors, which: Sequence[int]) -> list[torch.Tensor]:
    read = read_recipes(recipes)
    gathered = [index for index in which if read[index].makes_memory]
    with torch_compat.below_autograd():
        made = UNSHARD([inputs[read[i].data] for i in gathered], recipes, tags, gathered) if gathered else []
        padded = dict(zip(gathered, made, strict=True))
        full = [_without_padding(read[i], tags[i], padded.get(i, inputs[read[i].data])) for i in which]
    return full + [padded[index] for index in which if read[index].padding]


def _without_padding(recipe: Recipe, tag: str, padded: torch.Tensor) -> torch.Tensor:
    if recipe.makes_memory and not recipe.padding:
        return padded
    with tagged(tag, "unshard"):
        return padded[: recipe.rows] if recipe.padding else padded.detach()


def memory_to_free(recipes: Sequence[Recipe]) -> tuple[tuple[int, ...], ...]:
    """For each parameter where among what ``unshard`` of all returns there is memory that may be freed after use."""
    padded = itertools.count(len(recipes))
    places = [next(padded) if recipe.padding else index for index, recipe in enumerate(recipes)]
    return tuple((place,) if recipe.makes_memory else () for place, recipe in zip(places, recipes, strict=True))


class Unsharded(torch.autograd.Function):
    """The unsharded parameters of a group; the gradients of their targets among ``inputs`` are the reduced ones."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        recipes: str,
        tags: Sequence[str],
        which: Sequence[int],
        trains: Sequence[bool],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        made = _unshard(recipes, tags, inputs, which)
        ctx.set_materialize_grads(False)
        frozen = [full for index, full in zip(which, made, strict=False) if not trains[index]]
        ctx.mark_non_differentiable(*frozen, *made[len(which) :])
        ctx.recipes, ctx.tags, ctx.which, ctx.inputs = recipes, tags, which, len(inputs)
        ctx.save_for_backward(*_places(read_recipes(recipes), which, inputs))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        of_inputs: list[torch.Tensor | None] = [None] * ctx.inputs
        reduced = _reduce(ctx.recipes, ctx.tags, ctx.which, grads[: len(ctx.which)], ctx.saved_tensors)
        for index, grad in reduced.items():
            target = read_recipes(ctx.recipes)[index].target
            assert target is not None
            of_inputs[target] = grad
        return None, None, None, None, *of_inputs


@torch_compat.one_node
def with_reduction(recipes: str, index: int, tags: Sequence[str], inputs: Tensors, full: torch.Tensor) -> torch.Tensor:
    """The unsharded data ``full`` of parameter ``index`` as it is; its backward reduces the gradient."""
    read = read_recipes(recipes)
    target = read[index].target
    assert target is not None
    with torch.enable_grad():
        places = _places(read, (index,), inputs)
        return WithReduction.apply(recipes, index, tuple(tags), full, inputs[target], *places)


class WithReduction(torch.autograd.Function):
    """The unsharded data ``full`` as it is; the gradient of ``target`` is the reduction of its gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        recipes: str,
        index: int,
        tags: Sequence[str],
        full: torch.Tensor,
        target: torch.Tensor,
        *places: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.recipes, ctx.index, ctx.tags = recipes, index, tags
        ctx.save_for_backward(*places)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        reduced = _reduce(ctx.recipes, ctx.tags, (ctx.index,), (grad,), ctx.saved_tensors)
        return None, None, None, None, reduced[ctx.index], None, None


def _places(recipes: Sequence[Recipe], which: Sequence[int], inputs: Tensors) -> list[torch.Tensor | None]:
    """Where gradients may be set aside: of all ``which`` before and then of all after they were reduced over shards."""
    positions = [recipes[i].unsharded_place for i in which] + [recipes[i].partial_place for i in which]
    return [None if position is None else inputs[position] for position in positions]


class Due(NamedTuple):
    """A gradient to reduce, and where what is added to it may lie."""

    param: int
    grad: torch.Tensor
    unsharded_place: torch.Tensor | None
    partial_place: torch.Tensor | None


def _reduce(
    recipes: str, tags: Sequence[str], which: Sequence[int], grads: Gradients, places: Gradients
) -> dict[int, torch.Tensor]:
    """Of each of ``which`` that has a gradient, that of its target."""
    read, count = read_recipes(recipes), len(which)
    rows = zip(which, grads, places[:count], places[count:], strict=True)
    due = [Due(index, grad, *of) for index, grad, *of in rows if grad is not None]
    sent = [each for each in due if read[each.param].reduces]
    with torch_compat.below_autograd():
        reduced = _reduce_by_operator(recipes, tags, sent) if sent else {}
        for each in due:
            if not read[each.param].reduces:
                with tagged(tags[each.param], "reduce"):
                    reduced[each.param] = transitions.reduce(read[each.param], *each[1:])
    return reduced


def _reduce_by_operator(recipes: str, tags: Sequence[str], sent: Sequence[Due]) -> dict[int, torch.Tensor]:
    which, *tensors = (list(column) for column in zip(*sent, strict=True))
    return dict(zip(which, REDUCE(*tensors, recipes, tags, which), strict=True))


@torch_compat.one_node
def gather(recipes: str, index: int, tag: str, source: torch.Tensor) -> torch.Tensor:
    """All-gather one of the tensors that an extension sends for parameter ``index``."""
    recipe = read_recipes(recipes)[index]
    with tagged(tag, "unshard"), torch_compat.below_autograd():
        return source if recipe.gather_group is None else transitions.gather(source, recipe.world, recipe.gather_group)


@torch_compat.one_node
def free(tags: Sequence[str], made: Tensors, owned: Sequence[Sequence[int]]) -> None:
    """Record that the memory of those of ``made`` that each parameter has ``owned`` holds no data from here on."""
    freed = [(made[index], tag) for tag, some in zip(tags, owned, strict=True) for index in some]
    if freed:
        with torch_compat.below_autograd():
            FREE([tensor for tensor, _ in freed], [tag for _, tag in freed])


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
