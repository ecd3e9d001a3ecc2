"""FSDP2-style sharding whose state machine ``torch.compile`` can trace."""

from .backend import configure  # the module also registers the backends "fsdp" and "fsdp_eager"
from .communication import AllGather, Comm, ReduceScatter
from .explain import BreakPlace, Explanation, GraphRun, ModuleRun, explain
from .fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fsdp_param import FSDPParam, ShardedState
from .fsdp_param_group import FSDPParamGroup
from .fsdp_state import FSDPState
from .fully_shard import fully_shard
from .last_run import set_strict
from .mesh_info import DataParallelMeshDims, FSDPMeshInfo
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .shard_placement import ShardPlacementResult
from .trace_names import name_groups

__all__ = [
    "AllGather",
    "Comm",
    "BreakPlace",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "GraphRun",
    "MixedPrecisionPolicy",
    "ModuleRun",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedState",
    "UnshardHandle",
    "configure",
    "explain",
    "fully_shard",
    "name_groups",
    "register_fsdp_forward_method",
    "set_strict",
    "share_comm_ctx",
]
