"""What a graph needs to know of each parameter of a group, beside tensors; written as one text, which it can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Recipe:
    """How one parameter is unsharded, and its gradient reduced; see ``transitions``.

    Attributes:
        data: position of the sharded data among the inputs of the group.
        target: of the autograd leaf that gets what the graph makes of the gradient; ``None`` if there is none.
        unsharded_place, partial_place: of the leaves of the places where earlier backwards may have set gradients
            aside, before and after they were reduced over the shard ranks; ``None`` if they never do.
        slice_index: of the tensor that says which slice of ``slice`` is this rank's; or ``None``.
        device, compute_dtype: of the unsharded data.
        sharded_device, sharded_dtype: of the sharded data.
        grad_device, grad_dtype: of the gradient that the target gets; ``reduce_dtype`` is that of the communication.
        rows, padding: length of dimension 0 of the unsharded data, and of the padding at its end.
        shard_dim, world: the sharded dimension and the number of shard ranks.
        pre, op, post: see ``reduction.Scaling``.
        gather_group, reduce_group, replicate_group: names of process groups; ``None`` where nothing is to be done.
        syncs, all_reduces: whether gradients are reduced over the shard ranks, and then over the replicas.
        slice: number and process group of the fewer ranks that keep a slice after forward; or ``None``.
    """

    data: int
    target: int | None
    unsharded_place: int | None
    partial_place: int | None
    slice_index: int | None
    device: torch.device
    sharded_device: torch.device
    sharded_dtype: torch.dtype
    grad_device: torch.device
    grad_dtype: torch.dtype
    rows: int
    padding: int
    shard_dim: int
    world: int
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    pre: float
    op: str
    post: float
    gather_group: str | None
    reduce_group: str | None
    replicate_group: str | None
    syncs: bool
    all_reduces: bool
    slice: tuple[int, str] | None

    @property
    def makes_memory(self) -> bool:
        """Whether the unsharded data has memory of its own; else it is the sharded data."""
        same = (self.sharded_device, self.sharded_dtype) == (self.device, self.compute_dtype)
        return self.gather_group is not None or not same

    @property
    def reduces(self) -> bool:
        """Whether a collective reduces the gradient."""
        return self.syncs and bool(self.reduce_group or (self.all_reduces and self.replicate_group))


def write_recipes(recipes: Sequence[Recipe]) -> str:
    """All of a group as one text."""
    return json.dumps([asdict(recipe) for recipe in recipes], default=str)


@lru_cache(maxsize=4096)
def read_recipes(text: str) -> list[Recipe]:
    """What ``write_recipes`` wrote."""
    recipes = []
    for parts in json.loads(text):
        for name in ("compute_dtype", "reduce_dtype", "sharded_dtype", "grad_dtype"):
            parts[name] = getattr(torch, parts[name].removeprefix("torch."))
        for name in ("device", "sharded_device", "grad_device"):
            parts[name] = torch.device(parts[name])
        parts["slice"] = parts["slice"] and tuple(parts["slice"])
        recipes.append(Recipe(**parts))
    return recipes
