"""What each feature makes of two tiny blocks' communication, kept as text in ``expected/`` for people to review."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, skeletons_of
from int8_all_gather import gather_as_int8
from snapshots import assert_snapshot
from spmd import distributed, mesh_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from fsdp_compile import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes.graph_view import COPIES, all_reduces, gathers, reductions, tag_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RANKS, ROWS, WIDTH = 4, 3, 8  # of the batch; no parameter has so many rows


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def shard(model: nn.Sequential | None = None, **kwargs: Any) -> Any:
    """Each block on its own, the norm with the root."""
    model = blocks() if model is None else model
    for block in model[:2]:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def hsdp(**kwargs: Any) -> Any:
    return shard(mesh=mesh_of(replicate=2, shard=2), **kwargs)


def replicate_only(**kwargs: Any) -> Any:
    return shard(mesh=mesh_of(dp=RANKS), dp_mesh_dims=DataParallelMeshDims(replicate="dp"), **kwargs)


def other_dimension(**kwargs: Any) -> Any:
    return shard(shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None, **kwargs)


def fewer_ranks(**kwargs: Any) -> Any:
    return shard(reshard_after_forward=2, **kwargs)


def without_sync(**kwargs: Any) -> Any:
    model = shard(**kwargs)
    model.set_requires_gradient_sync(False)
    return model


def sync_after_without(**kwargs: Any) -> Any:
    model = without_sync(**kwargs)
    model.set_requires_gradient_sync(True)
    return model


def without_all_reduce(**kwargs: Any) -> Any:
    model = hsdp(**kwargs)
    model.set_requires_all_reduce(False)
    return model


def all_reduce_after_without(**kwargs: Any) -> Any:
    model = without_all_reduce(**kwargs)
    model.set_requires_all_reduce(True)
    return model


def int8(**kwargs: Any) -> Any:
    model = blocks()
    gather_as_int8(model)
    return shard(model, **kwargs)


def tied(**kwargs: Any) -> Any:
    model = blocks()
    model[1].weight = model[0].weight
    return fully_shard(model, **kwargs)


def frozen(**kwargs: Any) -> Any:
    model = blocks()
    model[1].weight.requires_grad_(False)
    return shard(model, **kwargs)


def module_list(**kwargs: Any) -> Any:
    model = blocks()
    fully_shard([model[0], model[1]], **kwargs)
    return fully_shard(model, **kwargs)


def tensor_parallel(**kwargs: Any) -> Any:
    mesh, model = mesh_of(dp=2, tp=2), blocks()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"], **kwargs)


def spmd_tensor_parallel(**kwargs: Any) -> Any:
    mesh = mesh_of(dp=2, tp=2)
    columns, rows = [Replicate(), Shard(0)], [Replicate(), Shard(1)]
    model = distributed(mesh, {"0.weight": columns, "0.bias": columns, "1.weight": rows}, make=blocks)
    return shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), **kwargs)


def spmd_hsdp(**kwargs: Any) -> Any:
    mesh, dims = mesh_of(replica=2, dp=2), DataParallelMeshDims(shard="dp", replicate="replica")
    return shard(distributed(mesh, make=blocks), mesh=mesh, dp_mesh_dims=dims, **kwargs)


class Checkpointed(nn.Sequential):
    """Runs its children under activation checkpointing, so that they run again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self:
            x = checkpoint(child, x, use_reentrant=False)
        return x


def checkpointed(**kwargs: Any) -> Any:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return shard(Checkpointed(*layers, nn.LayerNorm(WIDTH)), **kwargs)


FEATURES = [
    *(hsdp, replicate_only, other_dimension, fewer_ranks),
    *(without_sync, sync_after_without, without_all_reduce, all_reduce_after_without),
    *(int8, tied, frozen, module_list, checkpointed, tensor_parallel, spmd_tensor_parallel, spmd_hsdp),
]
features = pytest.mark.parametrize("build", FEATURES, ids=lambda build: build.__name__)


def compiled(build: Callable[..., nn.Module], **kwargs: Any) -> Stages:
    with fake_world(RANKS):
        return graphs_of(build(**kwargs), torch.ones(ROWS, WIDTH))


@features
def test_training(build: Callable[..., nn.Module]) -> None:
    shown = ("joint before", "forward after", "backward after")
    stages = [(stage, graph) for stage, graph in compiled(build) if stage in shown]
    assert_snapshot(f"feature_{build.__name__}", skeletons_of(stages))


def test_inference() -> None:
    with torch.no_grad():
        assert_snapshot("feature_inference", skeletons_of(compiled(shard)))


@features
def test_nothing_moves_or_is_cast_twice(build: Callable[..., nn.Module]) -> None:
    """In one graph; and what a group moves of one dtype, it moves at once."""
    for stage, graph in compiled(build, mp_policy=BF16):
        assert most(moved(graph)) <= 1, stage
        assert most(casts(graph)) <= 1, stage
        if stage in ("forward after", "backward after"):
            assert most(launches(graph)) <= 1, stage


def most(counts: Counter[Any]) -> int:
    return max(counts.values(), default=0)


def moved(graph: Graph) -> Counter[Any]:
    found = [each for kind in (gathers, reductions, all_reduces) for each in kind(graph)]
    return Counter((each.operator, each.tag.group, name) for each in found for name in each.tag.params)


def launches(graph: Graph) -> Counter[Any]:
    found = [each for kind in (gathers, reductions, all_reduces) for each in kind(graph)]
    return Counter((str(each.operator), each.tag.group, each.dtypes[0]) for each in found)


def casts(graph: Graph) -> Counter[Any]:
    """Of each parameter and gradient, by the dtypes. All casts but those of activations have tags."""
    counts: Counter[Any] = Counter()
    for node in graph.nodes:
        if node.target in COPIES and (before := dtype_of(node.all_input_nodes[0])) is not dtype_of(node):
            tag = tag_of(node)
            assert tag is not None or ROWS in node.meta["val"].shape, node.format_node()
            if tag is not None:
                counts[tag.group, tag.params, tag.phase, before, dtype_of(node)] += 1
    return counts


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]
