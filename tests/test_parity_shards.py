"""Uneven and empty shards, tied weights and reshard policies: eager, compiled, torch's fully_shard and one process."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import Net, TiedNet, assert_close_to_one_process, assert_same, shard, train
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard

MODELS = {
    "rows of 3": lambda: Net(out=3),
    "one row": lambda: Net(out=1),
    "odd width": lambda: Net(dim=13),
    "tied": TiedNet,
}


def compiled(model, backend="fsdp_eager"):
    return torch.compile(model, backend=backend, fullgraph=True)


def build(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(ranks2, name):
    ranks2.run(_all_agree, name, None)


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks(ranks4, name):
    ranks4.run(_all_agree, name, None)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_reshard_after_forward(ranks2, reshard_after_forward):
    ranks2.run(_all_agree, "rows of 3", reshard_after_forward)


def _all_agree(name, reshard_after_forward):
    dim = 13 if name == "odd width" else 12
    kwargs = {"reshard_after_forward": reshard_after_forward}
    model = shard(build(name), fully_shard, **kwargs)
    eager = train(model, dim=dim)
    other = shard(build(name), fully_shard, **kwargs)
    assert_same(eager, train(other, compiled(other), dim=dim))
    assert_same(eager, train(shard(build(name), torch_fsdp.fully_shard, **kwargs), dim=dim))
    assert_close_to_one_process(model, build(name), dim=dim)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16},
        {"reduce_dtype": torch.bfloat16},
        {"param_dtype": torch.float16},
    ],
    ids=str,
)
def test_mixed_precision(ranks4, dtypes):
    ranks4.run(_mixed_precision, dtypes)


def _mixed_precision(dtypes):
    ours, theirs = MixedPrecisionPolicy(**dtypes), torch_fsdp.MixedPrecisionPolicy(**dtypes)
    eager = train(shard(build("rows of 3"), fully_shard, mp_policy=ours))
    other = shard(build("rows of 3"), fully_shard, mp_policy=ours)
    assert_same(eager, train(other, compiled(other)))
    assert_same(eager, train(shard(build("rows of 3"), torch_fsdp.fully_shard, mp_policy=theirs)))


def test_reshard_to_fewer_ranks_and_replicas(ranks4):
    ranks4.run(_fewer_ranks)


def _fewer_ranks():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kwargs in ({"reshard_after_forward": 2}, {"mesh": mesh}, {"mesh": mesh, "reshard_after_forward": False}):
        model = shard(build("rows of 3"), fully_shard, **kwargs)
        assert_same(train(model), train(shard(build("rows of 3"), torch_fsdp.fully_shard, **kwargs)))
        assert_close_to_one_process(model, build("rows of 3"))


def test_public_names():
    shared = {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "UnshardHandle",
        "register_fsdp_forward_method",
    }
    assert shared <= set(fsdp_compile.__all__) & set(dir(torch_fsdp))
