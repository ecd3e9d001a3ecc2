"""``shard_placement_fn``: other dimensions than the first, and meshes of their own for some parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Net
from side_by_side import (
    LIBRARIES,
    api_of,
    assert_close,
    assert_same,
    build,
    one_batch,
    one_process,
    side_by_side,
    train,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Replicate, Shard

import fsdp_compile
from fsdp_compile import FSDPMeshInfo, ShardPlacementResult, fully_shard

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.dim() == 2 else None


def train_on_last_dim(replicas: int, kwargs: dict[str, Any]) -> None:
    kwargs = dict(kwargs)
    if replicas > 1:
        kwargs["mesh"] = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replica", "shard"))
    history = side_by_side(shard_placement_fn=last_dim, **kwargs)
    if "mp_policy" not in kwargs:
        assert_close(history, one_process())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "kwargs", [{}, {"mp_policy": MIXED}, {"reshard_after_forward": False}], ids=["fp32", "mixed", "kept"]
)
def test_another_dimension(ranks4, replicas: int, kwargs: dict[str, Any]) -> None:
    ranks4.run(train_on_last_dim, replicas, kwargs)


def train_resharding_to_two() -> None:
    """The slice that is kept is one of the whole tensor, not of the rank's part of the dimension."""
    histories = [
        train(build(fsdp_compile, shard_placement_fn=last_dim, reshard_after_forward=how)) for how in (2, True)
    ]
    assert_same(*histories)


def test_another_dimension_resharded_to_fewer_ranks(ranks4) -> None:
    ranks4.run(train_resharding_to_two)


def accumulate_on_last_dim() -> None:
    def iterate(model, step, data):
        model.set_requires_gradient_sync(False)
        first = one_batch(model, 2 * step, data)
        model.set_requires_gradient_sync(True)
        return first + one_batch(model, 2 * step + 1, data)

    side_by_side(iterate=iterate, shard_placement_fn=last_dim, mp_policy=MIXED)


def test_another_dimension_without_sync(ranks2) -> None:
    ranks2.run(accumulate_on_last_dim)


class Experts(nn.Module):
    """Parameters that each pair of ranks shares, beside some that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 12)
        self.experts = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(torch.relu(self.dense(x)))


def mesh_infos(library: Any) -> tuple[Any, Any]:
    """Constructors of placements and meshes, ours or torch's."""
    return (
        (ShardPlacementResult, FSDPMeshInfo)
        if library is fsdp_compile
        else (
            torch_common.ShardPlacementResult,
            torch_common.FSDPMeshInfo,
        )
    )


def shard_experts(model: Experts, fully_shard: Any, library: Any) -> Experts:
    placement_result, mesh_info = mesh_infos(library)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_parallel", "expert_shard"))
    for_experts = mesh_info(mesh=mesh["expert_shard"], shard_mesh_dim=0)
    experts = set(model.experts.parameters())

    def place(param: nn.Parameter) -> Any:
        return placement_result(Shard(0), for_experts) if param in experts else None

    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=place)


def train_experts() -> None:
    histories = []
    for library in LIBRARIES:
        torch.manual_seed(0)
        model = shard_experts(Experts(), api_of(library), library)
        histories.append(train(model))
        if library is fsdp_compile:
            assert [len(group.params) for group in model._fsdp_state.groups] == [2, 2]
            with pytest.raises(ValueError, match="set_all_reduce_hook: .* sharded over 2 meshes"):
                model.set_all_reduce_hook(lambda reduced: None)
            with pytest.raises(ValueError, match="set_custom_all_gather: .* 2 meshes"):
                model.set_custom_all_gather(None)
            with pytest.raises(ValueError, match="set_custom_reduce_scatter: .* 2 meshes"):
                model.set_custom_reduce_scatter(None)
    assert_same(*histories)


def test_parameters_with_a_mesh_of_their_own(ranks4) -> None:
    ranks4.run(train_experts)


def refuse() -> None:
    def unchanged(match: str, kind: type[Exception], answer: Any) -> None:
        model = Net()
        before = list(model.parameters())
        with pytest.raises(kind, match=match):
            fully_shard(model, shard_placement_fn=lambda param: answer if param is model.head.weight else None)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and type(model) is Net

    unchanged(r"head\.weight .*no dimension", ValueError, Shard(2))
    unchanged(r"head\.weight .*no dimension", ValueError, Shard(-3))
    unchanged(r"for parameter head\.weight returned Replicate", ValueError, Replicate())
    unchanged(r"for parameter head\.weight returned", ValueError, ShardPlacementResult(Shard(0), "mesh"))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)


def refuse_uneven() -> None:
    model = Narrow()
    weight = model.inner.weight
    with pytest.raises(NotImplementedError, match=r"inner\.weight of size \(6, 6\) does not divide evenly among 4"):
        fully_shard(model, shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None)
    assert model.inner.weight is weight and type(model) is Narrow


def test_bad_answers_name_the_parameter_and_change_nothing(ranks4) -> None:
    ranks4.run(refuse)
    ranks4.run(refuse_uneven)
