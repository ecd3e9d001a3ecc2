"""What ``fully_shard`` refuses, in words that name the module or the parameter, before it changes anything."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import torch_compat
from .fsdp_module import FSDPModule
from .mesh_info import DataParallelMeshDims
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .unsharding import has_extension


def check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ValueError(f"fully_shard was already applied to this module: {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers without a forward: {type(module).__name__}")


def check_types(mesh: Any, mp_policy: Any, offload_policy: Any, ignored_params: Any, dp_mesh_dims: Any) -> None:
    expected: list[tuple[str, Any, type, bool]] = [
        ("mesh", mesh, DeviceMesh, True),
        ("mp_policy", mp_policy, MixedPrecisionPolicy, False),
        ("offload_policy", offload_policy, OffloadPolicy, False),
        ("ignored_params", ignored_params, set, True),
        ("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims, True),
    ]
    for name, value, kind, optional in expected:
        if not isinstance(value, kind) and not (optional and value is None):
            wanted, found = (f"{cls.__module__}.{cls.__qualname__}" for cls in (kind, type(value)))
            raise TypeError(f"fully_shard({name}=...) takes a {wanted}, not a {found}")  # torch's own policies, say


def check_reshard(reshard_after_forward: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward should be a bool, an int or None, not {reshard_after_forward!r}")


def check_parameter(name: str, param: nn.Parameter, ranks: int | None) -> None:
    if isinstance(param, DTensor) and ranks is not None:
        raise NotImplementedError(
            f"reshard_after_forward={ranks} is not for tensor-parallel parameters, but {name} is one"
        )
    if has_extension(name, torch_compat.local_tensor(param)) and ranks is not None:
        raise NotImplementedError(
            f"reshard_after_forward={ranks} is not for parameters with an all-gather extension: {name}"
        )
    if param.dim() == 0:
        raise ValueError(f"fully_shard cannot shard the scalar parameter {name}; make it 1D with one element")
    if not param.is_contiguous():
        raise ValueError(
            f"fully_shard needs contiguous parameters, but {name} has size {tuple(param.size())} "
            f"and stride {param.stride()}"
        )
