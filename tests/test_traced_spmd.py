"""In graphs: parameters that are ``DTensor`` s on the mesh of all parallelism, with ``dp_mesh_dims``."""

import pytest
import torch
from models import batch, shard
from spmd import ON_FOUR_RANKS, data_ranks, distributed_with_columns, mesh_of
from torch.distributed.tensor import Replicate, Shard
from traced import SmallNet, Training, assert_equal, compiled, reset

from fsdp_compile import DataParallelMeshDims, MixedPrecisionPolicy, explain, fully_shard
from fsdp_compile.torch_compat import dynamo_counts

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ON_TWO_RANKS = [
    ({"dp": 2}, {"shard": "dp"}),
    ({"replica": 2}, {"replicate": "replica"}),
    ({"replica": 1, "dp": 2}, {"shard": "dp", "replicate": "replica"}),
    ({"dp": 1, "tp": 2}, {"shard": "dp"}),
]
DATA_AND_TENSOR = ({"dp": 2, "tp": 2}, {"shard": "dp"})
REPLICAS = ({"replica": 2, "dp": 2}, {"shard": "dp", "replicate": "replica"})


class BiasedNet(SmallNet):
    """The first layer of a block has a bias, which is cut like its rows."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = torch.nn.Linear(12, 12)


def build(sizes, dims, data=Shard(0), **kwargs):  # noqa: B008
    torch.manual_seed(0)
    mesh = mesh_of(**sizes)
    model = distributed_with_columns(mesh, make=BiasedNet, data=data)
    return shard(model, fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims), **kwargs)


def both(sizes, dims, **kwargs):
    """The same model twice: to train eagerly, and compiled."""
    reset()
    eager, model = build(sizes, dims, **kwargs), build(sizes, dims, **kwargs)
    return Training(eager), Training(model, compiled(model))


def part_of(sizes, step):
    ranks = data_ranks(mesh_of(**sizes))
    return batch(step).chunk(ranks.size())[ranks.get_local_rank()]


def agree(sizes, dims, **kwargs):
    """Bit for bit, and in one graph."""
    eager, traced = both(sizes, dims, **kwargs)
    for training in (eager, traced):
        for step in range(3):
            training.step(part_of(sizes, step))
    assert_equal(eager, traced)
    assert {run.how for run in explain(traced.model).modules} == {"in a graph"}
    assert dynamo_counts() == (1, 0, 0)


@pytest.mark.parametrize("sizes, dims", ON_TWO_RANKS, ids=str)
def test_two_ranks(ranks2, sizes, dims):
    ranks2.run(agree, sizes, dims)


@pytest.mark.parametrize("sizes, dims", ON_FOUR_RANKS, ids=str)
def test_four_ranks(ranks4, sizes, dims):
    ranks4.run(agree, sizes, dims)


@pytest.mark.parametrize("sizes, dims", [DATA_AND_TENSOR, REPLICAS], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{"mp_policy": BF16}, {"reshard_after_forward": False}, {"shard_placement_fn": 1}],
    ids=["bf16", "kept", "another dimension"],
)
def test_settings(ranks4, sizes, dims, kwargs):
    ranks4.run(_settings, sizes, dims, kwargs)


def _settings(sizes, dims, kwargs):
    if "shard_placement_fn" in kwargs:
        kwargs = {"shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None}
    agree(sizes, dims, **kwargs)


@pytest.mark.parametrize("sizes, dims", [DATA_AND_TENSOR, REPLICAS], ids=str)
def test_activations_that_count_as_replicated(ranks4, sizes, dims):
    """Then gradients are not partial over data-parallel ranks, though each rank has its own."""
    ranks4.run(_replicated, sizes, dims)


def _replicated(sizes, dims):
    agree(sizes, dims, data=Replicate())


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_accumulation(ranks4, method):
    ranks4.run(_accumulation, method)


def _accumulation(method):
    assert_equal(*accumulated(*REPLICAS, method))


def test_accumulation_of_gradients_partial_over_tensor_parallelism(ranks4):
    """Eagerly they are summed over it once, by graphs in each micro-batch: the same but for rounding."""
    ranks4.run(_accumulation_of_partial)


def _accumulation_of_partial():
    eager, traced = accumulated(*DATA_AND_TENSOR, "set_requires_gradient_sync")
    for ours, theirs in zip(traced.history, eager.history, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def accumulated(sizes, dims, method):
    """Both models after two steps of two micro-batches, of which ``method`` sets the first apart."""
    eager, traced = both(sizes, dims)
    for training in (eager, traced):
        for step in range(4):
            getattr(training.model, method)(step % 2 == 1)
            training.backward(training.call(part_of(sizes, step)).square().mean())
            if step % 2:
                training.update()
    return eager, traced


def test_frozen_and_without_gradients(ranks4):
    ranks4.run(_frozen)


def _frozen():
    sizes, dims = DATA_AND_TENSOR
    eager, traced = both(sizes, dims)
    for training in (eager, traced):
        for step in range(2):
            training.model.blocks[0].up.weight.requires_grad_(step == 1)
            training.step(part_of(sizes, step))
            with torch.no_grad():
                training.call(part_of(sizes, step))
    assert_equal(eager, traced)
