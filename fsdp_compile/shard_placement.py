"""What a user's ``shard_placement_fn`` says: on which dimension, and over which ranks, to shard a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn as nn
from torch.distributed.tensor import Shard

from .mesh_info import FSDPMeshInfo


@dataclass
class ShardPlacementResult:
    """A placement with a mesh of its own, for example for experts, which other ranks share than the rest.

    Attributes:
        placement: the dimension to shard; ``None`` means the first.
        mesh_info: which ranks shard and replicate this parameter.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def placement_of(
    name: str, param: nn.Parameter, shard_placement_fn: ShardPlacementFn | None, mesh_info: FSDPMeshInfo
) -> ShardPlacementResult:
    """Ask ``shard_placement_fn``; without an answer a parameter is sharded on dimension 0 over ``mesh_info``.

    Raises:
        ValueError: the answer is none of those allowed; the message names the parameter.
    """
    answer = None if shard_placement_fn is None else shard_placement_fn(param)
    if answer is None:
        return ShardPlacementResult(None, mesh_info)
    if isinstance(answer, Shard):
        return ShardPlacementResult(answer, mesh_info)
    if (
        isinstance(answer, ShardPlacementResult)
        and isinstance(answer.mesh_info, FSDPMeshInfo)
        and isinstance(answer.placement, (Shard, type(None)))
    ):
        return answer
    raise ValueError(
        f"shard_placement_fn should return None, a Shard or a ShardPlacementResult of a Shard and an FSDPMeshInfo, but "
        f"for parameter {name} returned {answer!r}"
    )
