"""Which ranks shard a parameter and which replicate it.

*Data-parallel mesh*: the ranks that see different batches. *SPMD mesh*: all ranks that hold parts of one model, those
of data parallelism and those of tensor parallelism; a user who has distributed all parameters on it names its
data-parallel dimensions with :class:`DataParallelMeshDims`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import torch_compat


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel dimensions of an SPMD mesh; several names are taken together as one dimension.

    Attributes:
        shard: dimension(s) over which parameters are sharded.
        replicate: dimension(s) over which shards are replicated.

    Raises:
        ValueError: neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs at least one of shard and replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class FSDPMeshInfo:
    """The data-parallel mesh of one parameter group.

    Attributes:
        mesh: 1-D or 2-D mesh over data-parallel ranks.
        shard_mesh_dim: mesh dimension over which parameters are sharded; ``None``: they are replicated only.
        replicate_mesh_dim: mesh dimension over which shards are replicated, or ``None``.
        dp_mesh_dims: how the user named the data-parallel dimensions of ``spmd_mesh``, if so.
        spmd_mesh: the mesh that all parameters are distributed on already.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = field(default=None, repr=False)
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ValueError("FSDPMeshInfo needs at least one of shard_mesh_dim and replicate_mesh_dim")

    @cached_property
    def shard_mesh_size(self) -> int:
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @cached_property
    def shard_mesh_rank(self) -> int:
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @cached_property
    def replicate_mesh_size(self) -> int:
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @cached_property
    def shard_process_group(self) -> dist.ProcessGroup | None:
        """The group that all-gathers parameters and reduce-scatters gradients, if they are sharded."""
        return None if self.shard_mesh_dim is None else self.mesh.get_group(self.shard_mesh_dim)

    @cached_property
    def replicate_process_group(self) -> dist.ProcessGroup | None:
        """The group that all-reduces the sharded gradients, if shards are replicated."""
        return None if self.replicate_mesh_dim is None else self.mesh.get_group(self.replicate_mesh_dim)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the shard ranks; without sharding, the mesh itself."""
        if self.mesh.ndim == 1 or self.shard_mesh_dim is None:
            return self.mesh
        assert self.mesh.mesh_dim_names is not None
        return self.mesh[self.mesh.mesh_dim_names[self.shard_mesh_dim]]

    @property
    def process_groups(self) -> tuple[str | None, str | None]:
        """Names of the shard and the replicate group: parameters can travel together if they have the same."""
        groups = (self.shard_process_group, self.replicate_process_group)
        return tuple(None if group is None else group.group_name for group in groups)  # type: ignore[return-value]


def default_mesh() -> DeviceMesh:
    """A 1-D mesh of all ranks, on the accelerator if there is one; starts the default process group if needed."""
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(device.type if device else "cpu", (dist.get_world_size(),))


def mesh_info_of(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Read a user's mesh: 1-D shards, 2-D shards over its last and replicates over its first dimension.

    With ``dp_mesh_dims`` the mesh is an SPMD mesh whose named dimensions shard and replicate. Names that stand for
    several dimensions are flattened to one, which is collective: it makes process groups.

    Raises:
        ValueError: the mesh has neither one nor two dimensions, or a dimension has no, or an unknown, name.
    """
    if dp_mesh_dims is not None:
        return _named_mesh_info(mesh, dp_mesh_dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh.ndim}D {mesh}")
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"fully_shard needs a 2D mesh to be made with mesh_dim_names, but got {mesh}")
    return FSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _named_mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims) -> FSDPMeshInfo:
    known = mesh.mesh_dim_names
    if known is None:
        raise ValueError(f"dp_mesh_dims needs a mesh made with mesh_dim_names, but got {mesh}")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise ValueError(f"dp_mesh_dims names the mesh dimension {name!r}, but the mesh has {known}")
    if not dims.replicate_names:
        return FSDPMeshInfo(_flat_submesh(mesh, dims.shard_names), 0, None, dims, mesh)
    replicas = _flat_submesh(mesh, dims.replicate_names)
    if not dims.shard_names:
        return FSDPMeshInfo(replicas, None, 0, dims, mesh)
    both = torch_compat.concatenate_meshes(replicas, _flat_submesh(mesh, dims.shard_names))
    return FSDPMeshInfo(both, 1, 0, dims, mesh)


def _flat_submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else torch_compat.flatten_mesh(mesh[names], "_".join(names))


def post_forward_mesh_info_of(ranks: int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo:
    """The mesh for ``reshard_after_forward=ranks``: each ``ranks`` neighbouring shard ranks hold the parameters whole.

    Collective: makes process groups.

    Raises:
        ValueError: ``ranks`` does not divide the number of shard ranks.
    """
    if not 1 <= ranks <= mesh_info.shard_mesh_size or mesh_info.shard_mesh_size % ranks:
        raise ValueError(
            f"reshard_after_forward={ranks} should divide the number of shard ranks, {mesh_info.shard_mesh_size}"
        )
    mesh = mesh_info.mesh
    return FSDPMeshInfo(DeviceMesh(mesh.device_type, mesh.mesh.view(-1, ranks)), shard_mesh_dim=1, replicate_mesh_dim=0)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on for ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
