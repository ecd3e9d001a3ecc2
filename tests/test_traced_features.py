"""Every feature of the state machine in the graph: bit for bit the eager result, on two ranks and on four."""

import pytest
import torch
from int8_all_gather import gather_as_int8
from models import Net, assert_same, mesh_2d, shard, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compile import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def hsdp(model):
    return shard(model, fully_shard, mesh=mesh_2d())


def hsdp_bf16(model):
    return shard(model, fully_shard, mesh=mesh_2d(), mp_policy=BF16)


def replicate_only(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    return shard(model, fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))


def replicate_only_bf16(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    return shard(model, fully_shard, mesh=mesh, mp_policy=BF16, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))


def other_dimension(model):
    return shard(model, fully_shard, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


def fewer_ranks(model):
    return shard(model, fully_shard, reshard_after_forward=torch.distributed.get_world_size() // 2)


def fewer_ranks_other_dimension(model):
    world = torch.distributed.get_world_size()
    place = lambda p: Shard(1) if p.dim() == 2 else None  # noqa: E731
    return shard(model, fully_shard, reshard_after_forward=world // 2, shard_placement_fn=place, mp_policy=BF16)


def int8(model):
    gather_as_int8(model.blocks)
    return shard(model, fully_shard)


def int8_kept(model):
    gather_as_int8(model.blocks)
    return shard(model, fully_shard, reshard_after_forward=False, mp_policy=BF16)


def offloaded(model):
    return shard(model, fully_shard, offload_policy=CPUOffloadPolicy())


def offloaded_bf16(model):
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return shard(model, fully_shard, mesh=mesh_2d(), mp_policy=mixed, offload_policy=CPUOffloadPolicy())


FEATURES = [
    hsdp,
    hsdp_bf16,
    replicate_only,
    replicate_only_bf16,
    other_dimension,
    fewer_ranks,
    fewer_ranks_other_dimension,
    int8,
    int8_kept,
    offloaded,
    offloaded_bf16,
]


def build(feature, cls=Net):
    torch.manual_seed(0)
    return feature(cls())


@pytest.mark.parametrize("feature", FEATURES)
def test_two_ranks(ranks2, feature):
    ranks2.run(_feature, feature)


@pytest.mark.parametrize("feature", FEATURES)
def test_four_ranks(ranks4, feature):
    ranks4.run(_feature, feature)


def _feature(feature):
    eager, model = build(feature), build(feature)
    expected = train(eager)
    assert_same(train(model, torch.compile(model, backend="fsdp_eager", fullgraph=True)), expected)
