"""Which ranks shard a parameter and which replicate it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class FSDPMeshInfo:
    """The data-parallel mesh of one parameter group.

    Attributes:
        mesh: 1-D or 2-D mesh over data-parallel ranks.
        shard_mesh_dim: mesh dimension over which parameters are sharded.
        replicate_mesh_dim: mesh dimension over which shards are replicated, or ``None``.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int
    replicate_mesh_dim: int | None = None

    @property
    def shard_mesh_size(self) -> int:
        return self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_mesh_rank(self) -> int:
        return self.mesh.get_local_rank(self.shard_mesh_dim)

    @property
    def replicate_mesh_size(self) -> int:
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The group that all-gathers parameters and reduce-scatters gradients."""
        return self.mesh.get_group(self.shard_mesh_dim)

    @property
    def replicate_process_group(self) -> dist.ProcessGroup | None:
        """The group that all-reduces the sharded gradients, if shards are replicated."""
        return None if self.replicate_mesh_dim is None else self.mesh.get_group(self.replicate_mesh_dim)


def default_mesh() -> DeviceMesh:
    """A 1-D mesh of all ranks, on the accelerator if there is one; starts the default process group if needed."""
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(device.type if device else "cpu", (dist.get_world_size(),))


def mesh_info_of(mesh: DeviceMesh) -> FSDPMeshInfo:
    """Read a user's mesh: 1-D shards, 2-D shards over its last and replicates over its first dimension.

    Raises:
        ValueError: the mesh has neither one nor two dimensions, or a 2-D mesh has no dimension names.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh.ndim}D {mesh}")
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"fully_shard needs a 2D mesh to be made with mesh_dim_names, but got {mesh}")
    return FSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


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
