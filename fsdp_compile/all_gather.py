"""The eager all-gather of a group's parameters, by way of one flat buffer.

    shards ─ copy in ─> buffer ─ one collective ─> buffer ─ copy out ─> each parameter's own output

The outputs get memory only when they are copied to: who reads a parameter too early meets a storage of size zero, an
error, and not what happens to lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .communication import WIRE_DTYPES, AllGather
from .mesh_info import FSDPMeshInfo
from .streams import Lanes

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam


class Gather(Protocol):
    """An all-gather under way."""

    def wait(self) -> None:
        """Afterwards all outputs of the parameters hold data."""


def launch_all_gather(params: Sequence[FSDPParam], mesh_info: FSDPMeshInfo, lanes: Lanes, comm: AllGather) -> Gather:
    """Start one all-gather, by ``comm``, for all ``params`` over the shard ranks of ``mesh_info``."""
    if mesh_info.shard_mesh_size == 1:
        return _NoGather(params)
    return _FlatGather(params, mesh_info, lanes, comm)


class _NoGather:
    """The only shard rank has it all."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._inputs = [(param, param.all_gather_inputs()) for param in params]

    def wait(self) -> None:
        for param, inputs in self._inputs:
            for output, source in zip(param.all_gather_outputs(inputs), inputs, strict=True):
                output.view(-1).copy_(source.view(-1))


class _FlatGather:
    @torch.no_grad()
    def __init__(self, params: Sequence[FSDPParam], mesh_info: FSDPMeshInfo, lanes: Lanes, comm: AllGather) -> None:
        group = mesh_info.shard_process_group
        assert group is not None
        self._lanes, self._world_size = lanes, mesh_info.shard_mesh_size
        with lanes.copy_in.on():
            self._inputs = [(param, param.all_gather_inputs()) for param in params]
            sources = [tensor for _, inputs in self._inputs for tensor in inputs]
            self._dtype = _common_dtype(sources)
            sources = [_as_sent(tensor, self._dtype) for tensor in sources]
            self._sizes = [tensor.numel() for tensor in sources]
            total = sum(self._sizes)
            self._buffer = comm.allocate((total * self._world_size,), dtype=self._dtype, device=params[0].device)
            mine = self._buffer.narrow(0, total * mesh_info.shard_mesh_rank, total)
            torch._foreach_copy_(mine.split(self._sizes), sources)
        with lanes.copy_in.on():
            lanes.all_gather.catch_up()
        self._ticket = lanes.all_gather.run(lambda async_op: comm(self._buffer, mine, group, async_op))
        lanes.release_retired()

    @torch.no_grad()
    def wait(self) -> None:
        self._ticket.wait()
        targets = [
            output.view(self._world_size, -1).view(self._dtype)
            for param, inputs in self._inputs
            for output in param.all_gather_outputs(inputs)
        ]
        torch._foreach_copy_(targets, self._buffer.view(self._world_size, -1).split(self._sizes, dim=1))
        self._lanes.retire(self._buffer)
        del self._buffer, self._inputs


def _as_sent(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = tensor.view(-1) if tensor.dim() != 1 else tensor
    return flat.view(dtype) if flat.dtype != dtype else flat


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """In which they are sent together: as bytes if they differ, or if a transport might not know their dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= WIRE_DTYPES else torch.uint8
