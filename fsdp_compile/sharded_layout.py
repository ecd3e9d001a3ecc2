"""Where the elements of one parameter live: in the original tensor, in each rank's shard, on which mesh.

Three kinds of original parameter have a layout:

- a plain tensor: sharded on one dimension over the shard ranks of the data-parallel mesh;
- a ``DTensor`` of tensor parallelism, on a mesh apart from the data-parallel one: its local tensor is sharded further,
  and the result is a ``DTensor`` on both meshes together, data parallelism first;
- a ``DTensor`` on an SPMD mesh, replicated over the data-parallel dimensions, which ``dp_mesh_dims`` names.

Where tensor parallelism has sharded the same dimension already, this rank's shard is a piece of a piece: the order of
data parallelism before tensor parallelism in the mesh is not the order of cutting. ``_StridedShard`` says so to
DTensor (as in torch's ``fully_shard``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import torch_compat
from .mesh_info import FSDPMeshInfo
from .torch_compat import DTensorSpec


@dataclass(frozen=True)
class ShardedLayout:
    """How one parameter is sharded.

    Attributes:
        size: of the original parameter; of its local tensor if it is a ``DTensor``.
        shard_dim: the dimension that is sharded; not 0 only if it divides evenly.
        world_size: number of shard ranks.
        rank: of this process among them.
        mesh: of the sharded parameter, a ``DTensor``.
        placements: of the sharded parameter on ``mesh``.
        global_size: of the sharded parameter, hence of the model's parameter as a whole.
        unsharded_spec: how the original was distributed, if it is a ``DTensor``: so is the unsharded parameter.
        data_parallel_dims: dimensions of ``unsharded_spec``'s mesh over which gradients are left for us to reduce.
    """

    size: torch.Size
    shard_dim: int
    world_size: int
    rank: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_size: torch.Size
    unsharded_spec: DTensorSpec | None = None
    data_parallel_dims: frozenset[int] = frozenset()
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the original parameter, which is contiguous."""
        return torch_compat.contiguous_stride(self.size)

    @cached_property
    def padded_sharded_size(self) -> torch.Size:
        """Size of the sharded data: the sharded dimension rounded up so that it is equal on all ranks."""
        return self._with_length(-(-self.size[self.shard_dim] // self.world_size))

    @cached_property
    def sharded_size(self) -> torch.Size:
        """Size of this rank's shard; the sharded dimension may be shorter than padded, or 0."""
        return self.sharded_size_of(self.rank)

    @cached_property
    def padded_sharded_numel(self) -> int:
        return math.prod(self.padded_sharded_size)

    @cached_property
    def padded_size(self) -> torch.Size:
        """Size of all shards with their padding, one after the other."""
        return self._with_length(self.padded_sharded_size[self.shard_dim] * self.world_size)

    @property
    def padding(self) -> int:
        """How much longer the sharded dimension is with padding, in all."""
        return self.padded_size[self.shard_dim] - self.size[self.shard_dim]

    def sharded_size_of(self, rank: int) -> torch.Size:
        padded = self.padded_sharded_size[self.shard_dim]
        return self._with_length(min(max(self.size[self.shard_dim] - padded * rank, 0), padded))

    def _with_length(self, length: int) -> torch.Size:
        return torch.Size([*self.size[: self.shard_dim], length, *self.size[self.shard_dim + 1 :]])

    def shard_of(self, local: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the original ``local``, a view; ``None`` if it is empty."""
        chunks = local.chunk(self.world_size, dim=self.shard_dim)
        return chunks[self.rank] if self.rank < len(chunks) and self.sharded_size.numel() else None

    def without_padding(self, padded: torch.Tensor) -> torch.Tensor:
        """The first elements of ``padded``, of size ``padded_sharded_size``: this rank's shard."""
        return padded.narrow(self.shard_dim, 0, self.sharded_size[self.shard_dim])

    def to_sharded_dtensor(self, local: torch.Tensor) -> DTensor:
        """Wrap a tensor of size ``sharded_size`` as a shard of the whole parameter."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            spec = torch_compat.contiguous_spec(self.mesh, self.placements, self.global_size, local.dtype)
            self._specs[local.dtype] = spec
        return torch_compat.dtensor_of(local, spec)

    def to_unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap an unsharded tensor the way that the original was distributed, if it was."""
        if self.unsharded_spec is None:
            return local
        return torch_compat.dtensor_of(local, torch_compat.spec_with_dtype(self.unsharded_spec, local.dtype))

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the original's local tensor, of size ``size``.

        Tensor parallelism may leave it partial, or placed otherwise than the parameter: it is redistributed then,
        except over data-parallel dimensions, where the reduction is ours.
        """
        grad = torch_compat.wait_if_async(grad)
        if self.unsharded_spec is None:
            return grad
        if not isinstance(grad, DTensor):
            raise RuntimeError(f"expected the gradient of a DTensor parameter to be a DTensor, got {type(grad)}")
        wanted = tuple(
            found if dim in self.data_parallel_dims else placement
            for dim, (placement, found) in enumerate(zip(self.unsharded_spec.placements, grad.placements, strict=True))
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return torch_compat.wait_if_async(torch_compat.local_tensor(grad))


def layout_of(name: str, param: nn.Parameter, mesh_info: FSDPMeshInfo, placement: Shard | None) -> ShardedLayout:
    """Choose the layout of ``param``, called ``name`` in errors.

    Args:
        placement: the dimension to shard, negative from the end; ``None`` means the first.

    Raises:
        ValueError: no such dimension, or the parameter's own distribution does not fit the mesh.
        NotImplementedError: another dimension than the first that the shard ranks do not divide evenly.
    """
    local = torch_compat.local_tensor(param)
    shard_dim = 0 if placement is None else placement.dim + (local.dim() if placement.dim < 0 else 0)
    if not 0 <= shard_dim < local.dim():
        raise ValueError(f"Parameter {name} of size {tuple(local.size())} has no dimension {placement} to shard")
    world_size = mesh_info.shard_mesh_size
    if shard_dim > 0 and local.size(shard_dim) % world_size:
        raise NotImplementedError(
            f"Parameter {name} of size {tuple(local.size())} does not divide evenly among {world_size} shard ranks on "
            f"dimension {shard_dim}; only dimension 0 may be sharded unevenly"
        )
    common: dict[str, Any] = {
        "size": local.size(),
        "shard_dim": shard_dim,
        "world_size": world_size,
        "rank": mesh_info.shard_mesh_rank,
        "global_size": param.size(),
    }
    if not isinstance(param, DTensor):
        _check_plain(name, mesh_info)
        return ShardedLayout(mesh=mesh_info.mesh, placements=_data_parallel(mesh_info, Shard(shard_dim)), **common)
    if param.device_mesh.device_type != mesh_info.mesh.device_type:
        raise ValueError(
            f"Parameter {name} is a DTensor on {param.device_mesh.device_type}, but the mesh of fully_shard is on "
            f"{mesh_info.mesh.device_type}"
        )
    of_dtensor = _tensor_parallel if mesh_info.spmd_mesh is None else _spmd
    return ShardedLayout(**of_dtensor(name, param, mesh_info, shard_dim), **common)


def _data_parallel(mesh_info: FSDPMeshInfo, shard: Placement) -> tuple[Placement, ...]:
    """Placements on the data-parallel mesh."""
    kinds: list[Placement] = [Replicate()] * mesh_info.mesh.ndim
    if mesh_info.shard_mesh_dim is not None:
        kinds[mesh_info.shard_mesh_dim] = shard
    return tuple(kinds)


def _check_plain(name: str, mesh_info: FSDPMeshInfo) -> None:
    dims = mesh_info.dp_mesh_dims
    if dims is None or mesh_info.spmd_mesh is None:
        return
    others = [
        dim
        for dim in mesh_info.spmd_mesh.mesh_dim_names or ()
        if dim not in dims.shard_names and dim not in dims.replicate_names
    ]
    if others:
        raise ValueError(
            f"Parameter {name} is no DTensor, so that nothing says how it lies on mesh dimension {others[0]!r}; with "
            "dp_mesh_dims on a mesh of more than data parallelism, distribute all parameters on it (distribute_module)"
        )


def _shard_after(placements: tuple[Placement, ...], mesh: DeviceMesh, shard_dim: int) -> Placement:
    """Sharding ``shard_dim`` on a mesh dimension to the left of those of ``mesh``, which have cut it already."""
    pieces = 1
    for dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, torch_compat.StridedShard)) and placement.dim == shard_dim:
            pieces *= mesh.size(dim)
    return torch_compat.StridedShard(shard_dim, split_factor=pieces) if pieces > 1 else Shard(shard_dim)


def _tensor_parallel(name: str, param: DTensor, mesh_info: FSDPMeshInfo, shard_dim: int) -> dict[str, Any]:
    spec = torch_compat.spec_of(param)
    try:
        mesh = torch_compat.concatenate_meshes(mesh_info.mesh, spec.mesh)
    except Exception as error:
        raise ValueError(
            f"Parameter {name} is a DTensor on {spec.mesh}, which does not fit together with the data-parallel mesh "
            f"{mesh_info.mesh}: slice both from one mesh with named dimensions"
        ) from error
    shard = _shard_after(spec.placements, spec.mesh, shard_dim)
    placements = (*_data_parallel(mesh_info, shard), *spec.placements)
    return {"mesh": mesh, "placements": placements, "unsharded_spec": spec}


def _spmd(name: str, param: DTensor, mesh_info: FSDPMeshInfo, shard_dim: int) -> dict[str, Any]:
    spec, dims = torch_compat.spec_of(param), mesh_info.dp_mesh_dims
    assert dims is not None and mesh_info.spmd_mesh is not None
    if spec.mesh != mesh_info.spmd_mesh:
        raise ValueError(f"Parameter {name} is a DTensor on {spec.mesh}, not on the mesh given: {mesh_info.spmd_mesh}")
    names = spec.mesh.mesh_dim_names
    assert names is not None
    shard_dims = [names.index(dim) for dim in dims.shard_names]
    ours = frozenset([*shard_dims, *(names.index(dim) for dim in dims.replicate_names)])
    for dim in sorted(ours):
        if not isinstance(spec.placements[dim], Replicate):
            raise ValueError(
                f"Parameter {name} should be Replicate() on the data-parallel mesh dimension {names[dim]!r}, but is "
                f"{spec.placements[dim]}"
            )
    placements = list(spec.placements)
    for dim in shard_dims:
        left_of = (Replicate(),) * (dim + 1) + spec.placements[dim + 1 :]  # only what is cut to the right counts
        placements[dim] = _shard_after(left_of, spec.mesh, shard_dim)
    mesh = spec.mesh
    if len(shard_dims) > 1:
        mesh, placements = _flattened(mesh_info, placements, shard_dims)
    return {"mesh": mesh, "placements": tuple(placements), "unsharded_spec": spec, "data_parallel_dims": ours}


def _flattened(
    mesh_info: FSDPMeshInfo, placements: list[Placement], shard_dims: list[int]
) -> tuple[DeviceMesh, list[Placement]]:
    """Several shard dimensions as the one that they were flattened to, so that the parameter is sharded once.

    The data-parallel mesh as a whole, replicas first, stands where the first shard dimension was.
    """
    spmd, dims = mesh_info.spmd_mesh, mesh_info.dp_mesh_dims
    assert spmd is not None and dims is not None and spmd.mesh_dim_names is not None
    meshes: list[DeviceMesh] = []
    kinds: list[Placement] = []
    for dim, name in enumerate(spmd.mesh_dim_names):
        if dim == shard_dims[0]:
            meshes.append(mesh_info.mesh)
            kinds.extend(_data_parallel(mesh_info, placements[dim]))
        elif dim not in shard_dims and name not in dims.replicate_names:
            meshes.append(spmd[name])
            kinds.append(placements[dim])
    return torch_compat.concatenate_meshes(*meshes), kinds
