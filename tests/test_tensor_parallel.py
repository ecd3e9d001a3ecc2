"""Parameters that are DTensors already: of tensor parallelism on a mesh apart, or of all parallelism on one mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Net, batch
from side_by_side import LIBRARIES, assert_close, build, loss_of, one_batch, one_process, side_by_side, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import DataParallelMeshDims, fully_shard

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


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


def distributed(mesh: DeviceMesh, placements: dict[str, list[Placement]] | None = None) -> Net:
    """The model with all parameters on ``mesh``, replicated but where ``placements`` says otherwise."""
    model = Net()
    for name, param in list(model.named_parameters()):
        kinds = (placements or {}).get(name, [Replicate()] * mesh.ndim)
        owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        owner.register_parameter(attribute, nn.Parameter(distribute_tensor(param.data, mesh, kinds)))
    forward = model.forward

    def on_local_tensors(x: torch.Tensor) -> torch.Tensor:
        kinds = [Shard(0) if name != "tp" else Replicate() for name in mesh.mesh_dim_names]
        output = forward(DTensor.from_local(x, mesh, kinds, run_check=False))
        return output.redistribute(placements=kinds).to_local()

    model.forward = on_local_tensors
    return model


def train_spmd(sizes: dict[str, int], dims: dict[str, Any]) -> None:
    mesh = mesh_of(**sizes)
    data_dims = [name for name in sizes if name != "tp"]
    ranks = mesh[tuple(data_dims)]._flatten("all_data") if len(data_dims) > 1 else mesh[data_dims[0]]

    def iterate(model, step, data):
        return one_batch(model, step, lambda i: batch(i).chunk(ranks.size())[ranks.get_local_rank()])

    cut = [Shard(0) if name == "tp" else Replicate() for name in sizes]
    placements = {"blocks.0.up.weight": cut, "blocks.0.up.bias": cut} if "tp" in sizes else {}
    make = lambda: distributed(mesh, placements)  # noqa: E731
    history = side_by_side(make, iterate=iterate, apply=shard_with_dims, dims=dims, mesh=mesh)
    assert_close(history, one_process())


def shard_with_dims(model: nn.Module, fully_shard: Any, dims: dict[str, Any], **kwargs: Any) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module, dp_mesh_dims=dims, **kwargs)
    return model


@pytest.mark.parametrize(
    "sizes, dims",
    [
        ({"dp": 4}, {"shard": "dp"}),
        ({"dp": 2, "tp": 2}, {"shard": "dp"}),
        ({"tp": 2, "dp": 2}, {"replicate": "dp"}),  # torch compares meshes by identity, DTensor caches them by value
        ({"replica": 4}, {"replicate": "replica"}),
        ({"replica": 2, "dp": 2}, {"shard": "dp", "replicate": "replica"}),
        ({"dp": 2, "cp": 2}, {"shard": ("dp", "cp")}),
        ({"replica": 1, "dp": 2, "cp": 1, "tp": 2}, {"shard": ("dp", "cp"), "replicate": "replica"}),
    ],
    ids=lambda value: str(value),
)
def test_spmd_mesh(ranks4, sizes: dict[str, int], dims: dict[str, Any]) -> None:
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
