"""FSDP2-style sharding whose state machine ``torch.compile`` can trace."""

from . import backend as _backend  # registers the backends "fsdp" and "fsdp_eager"
from .communication import AllGather, Comm, ReduceScatter
from .fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fsdp_param import FSDPParam, ShardedState
from .fsdp_param_group import FSDPParamGroup
from .fsdp_state import FSDPState
from .fully_shard import fully_shard
from .mesh_info import DataParallelMeshDims, FSDPMeshInfo
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .shard_placement import ShardPlacementResult

__all__ = [
    "AllGather",
    "Comm",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "ReduceScatter",
    "ShardPlacementResult",
    "share_comm_ctx",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedState",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]

del _backend
