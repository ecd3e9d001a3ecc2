"""Models all of whose parameters are ``DTensor`` s on one mesh, that of all parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Net
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

Sizes, Dims = dict[str, int], dict[str, Any]  # of a mesh; arguments of ``DataParallelMeshDims``

ON_FOUR_RANKS: list[Any] = [
    ({"dp": 4}, {"shard": "dp"}),
    ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    ({"tp": 2, "dp": 2}, {"replicate": "dp"}),  # torch compares meshes by identity, DTensor caches them by value
    ({"replica": 4}, {"replicate": "replica"}),
    ({"replica": 2, "dp": 2}, {"shard": "dp", "replicate": "replica"}),
    ({"dp": 2, "cp": 2}, {"shard": ("dp", "cp")}),
    pytest.param(
        *({"replica": 1, "dp": 2, "cp": 1, "tp": 2}, {"shard": ("dp", "cp"), "replicate": "replica"}),
        marks=pytest.mark.slow,
        id="all kinds of parallelism",
    ),
]


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that see different batches, in one dimension."""
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return mesh[names]._flatten("all_data") if len(names) > 1 else mesh[names[0]]


def distributed(
    mesh: DeviceMesh,
    placements: dict[str, list[Placement]] | None = None,
    make: Callable[[], nn.Module] = Net,
    data: Placement = Shard(0),  # noqa: B008  # immutable
) -> nn.Module:
    """The model with all parameters on ``mesh``, replicated but where ``placements`` says otherwise.

    Args:
        data: how activations lie over dimensions of data parallelism.
    """
    model = make()
    for name, param in list(model.named_parameters()):
        kinds = (placements or {}).get(name, [Replicate()] * mesh.ndim)
        owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        owner.register_parameter(attribute, nn.Parameter(distribute_tensor(param.data, mesh, kinds)))
    forward = model.forward

    def on_local_tensors(x: torch.Tensor) -> torch.Tensor:
        kinds = [data if name != "tp" else Replicate() for name in mesh.mesh_dim_names]
        output = forward(DTensor.from_local(x, mesh, kinds, run_check=False))
        return output.redistribute(placements=kinds).to_local()

    model.forward = on_local_tensors
    return model


def distributed_with_columns(mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """Also cut over "tp", where the mesh has it: the first linear layer of a block, by columns."""
    cut = [Shard(0) if name == "tp" else Replicate() for name in mesh.mesh_dim_names]
    return distributed(mesh, {"blocks.0.up.weight": cut, "blocks.0.up.bias": cut}, **kwargs)
