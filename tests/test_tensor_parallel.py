"""Parameters that are DTensors already: of tensor parallelism on a mesh apart, or of all parallelism on one mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Net, batch
from side_by_side import LIBRARIES, assert_close, build, loss_of, one_batch, one_process, side_by_side, train
from spmd import ON_FOUR_RANKS, Dims, Sizes, data_ranks, distributed, distributed_with_columns, mesh_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import DataParallelMeshDims, fully_shard

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def tensor_parallel(mesh: DeviceMesh, **kwargs: Any) -> Net:
    """The model with its blocks' linear layers cut over ``mesh``, one by columns and one by rows."""
    model = Net(**kwargs)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(use_local_output=True), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def on_parts_of(mesh: DeviceMesh, dim: str):
    """Iterations in which ranks along ``dim`` of ``mesh`` see different parts of a batch and the others the same."""

    def iterate(model, step, data):
        return one_batch(model, step, lambda i: batch(i).chunk(mesh.size(dim_of(mesh, dim)))[mesh.get_local_rank(dim)])

    return iterate


def dim_of(mesh: DeviceMesh, name: str) -> int:
    return mesh.mesh_dim_names.index(name)


def train_tensor_parallel(mp_policy: dict[str, Any] | None, out: int) -> None:
    mesh = mesh_of(dp=2, tp=2)
    history = side_by_side(
        lambda: tensor_parallel(mesh["tp"], out=out),
        iterate=on_parts_of(mesh, "dp"),
        mesh=mesh["dp"],
        mp_policy=mp_policy or {},
    )
    if mp_policy is None:
        assert_close(history, one_process(lambda: Net(out=out)))


@pytest.mark.parametrize("mp_policy", [None, MIXED], ids=["fp32", "bf16 and fp32"])
@pytest.mark.parametrize("out", [4, 3], ids=["even", "uneven"])
def test_data_and_tensor_parallel(ranks4, mp_policy: dict[str, Any] | None, out: int) -> None:
    ranks4.run(train_tensor_parallel, mp_policy, out)


def train_three_dimensional() -> None:
    """A pipeline of one stage, so that the mesh of the rest is a slice of a larger one."""
    mesh = mesh_of(pp=1, dp=2, tp=2)
    side_by_side(lambda: tensor_parallel(mesh["tp"]), iterate=on_parts_of(mesh, "dp"), mesh=mesh["dp"])


def test_with_a_pipeline_dimension(ranks4) -> None:
    ranks4.run(train_three_dimensional)


def train_replicated() -> None:
    mesh = mesh_of(replica=2, dp=1, tp=2)
    side_by_side(lambda: tensor_parallel(mesh["tp"]), iterate=on_parts_of(mesh, "replica"), mesh=mesh["replica", "dp"])


def test_hybrid_sharding_and_tensor_parallel(ranks4) -> None:
    ranks4.run(train_replicated)


def compare_state_dicts() -> None:
    """Placements, mesh and values, also where both kinds of parallelism cut dimension 0 (``_StridedShard``)."""
    mesh = mesh_of(dp=2, tp=2)
    ours, theirs = (
        build(library, lambda: tensor_parallel(mesh["tp"]), mesh=mesh["dp"]).state_dict() for library in LIBRARIES
    )
    torch.manual_seed(0)
    whole = Net().state_dict()
    assert list(ours) == list(theirs)
    strided = 0
    for name, mine in ours.items():
        other = theirs[name]
        assert (mine.placements, mine.device_mesh) == (other.placements, other.device_mesh), name
        assert torch.equal(mine.to_local(), other.to_local()), name
        assert torch.equal(mine.full_tensor(), whole[name]), name
        strided += "_StridedShard" in repr(mine.placements)
    assert strided


def test_sharded_state_dict(ranks4) -> None:
    ranks4.run(compare_state_dicts)


class PartialGradient(nn.Module):
    """Uses a replicated DTensor in a way that leaves its gradient partial over tensor-parallel ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(12, 12), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        return (parts @ self.weight).redistribute(placements=[Replicate()]).to_local()


def train_partial_gradients(micro_batches: int) -> None:
    mesh = mesh_of(dp=2, tp=2)

    def iterate(model, step, data):
        losses = []
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            part = batch(micro_batches * step + i).chunk(2)[mesh.get_local_rank("dp")]
            losses.append(loss_of(model(part)))
            losses[-1].backward()
        return losses

    side_by_side(
        lambda: PartialGradient(mesh["tp"]),
        apply=lambda m, fully_shard, **kw: fully_shard(m, **kw),
        iterate=iterate,
        mesh=mesh["dp"],
        mp_policy=MIXED if micro_batches > 1 else {},
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_partial_gradients(ranks4, micro_batches: int) -> None:
    ranks4.run(train_partial_gradients, micro_batches)


def train_spmd(sizes: Sizes, dims: Dims) -> None:
    mesh = mesh_of(**sizes)
    ranks = data_ranks(mesh)

    def iterate(model, step, data):
        return one_batch(model, step, lambda i: batch(i).chunk(ranks.size())[ranks.get_local_rank()])

    make = lambda: distributed_with_columns(mesh)  # noqa: E731
    history = side_by_side(make, iterate=iterate, apply=shard_with_dims, dims=dims, mesh=mesh)
    assert_close(history, one_process())


def shard_with_dims(model: nn.Module, fully_shard: Any, dims: dict[str, Any], **kwargs: Any) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module, dp_mesh_dims=dims, **kwargs)
    return model


@pytest.mark.parametrize("sizes, dims", ON_FOUR_RANKS, ids=str)
def test_spmd_mesh(ranks4, sizes: Sizes, dims: Dims) -> None:
    ranks4.run(train_spmd, sizes, dims)


def train_replicate_only() -> None:
    """Plain parameters on a mesh of data parallelism only, each rank with all of them."""
    mesh = mesh_of(dp=4)
    torch.manual_seed(0)
    model = shard_with_dims(Net(), fully_shard, DataParallelMeshDims(replicate="dp"), mesh=mesh)
    assert all(param.to_local().shape == param.shape for param in model.parameters())
    assert_close(train(model), one_process())


def test_replicate_only_with_plain_parameters(ranks4) -> None:
    ranks4.run(train_replicate_only)


def refuse() -> None:
    mesh = mesh_of(dp=2, tp=2)
    with pytest.raises(NotImplementedError, match=r"not for tensor-parallel parameters, but blocks\.0\.up\.weight"):
        fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=2)
    with pytest.raises(ValueError, match=r"inp\.weight is no DTensor.*'tp'"):
        fully_shard(Net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="'data', but the mesh has"):
        fully_shard(Net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    sharded = {"head.bias": [Shard(0), Replicate()], "head.weight": [Shard(0), Replicate()]}
    with pytest.raises(ValueError, match=r"head\.weight should be Replicate\(\).*'dp'"):
        fully_shard(distributed(mesh, sharded), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"inp\.weight is a DTensor on .*not on the mesh given"):
        fully_shard(distributed(other), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="at least one of shard and replicate"):
        DataParallelMeshDims()


def test_what_does_not_fit_is_refused(ranks4) -> None:
    ranks4.run(refuse)
