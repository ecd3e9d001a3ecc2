"""The interface of a collective and its buffers, for users who bring their own; and the three kinds that come with it.

A communication answers three questions: how its buffers are allocated (one for each call, or one kept), where (the
usual allocator, or one that the transport prefers), and what a call of it sends. Names and signatures are those of
torch's FSDP2, so that classes written for it can be passed here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import torch_compat

# In which tensors are sent as they are; others go as bytes, because a transport might not know their dtype.
WIRE_DTYPES = frozenset(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int32, torch.int64]
)


class Comm(ABC):
    """A collective with its buffers."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of ``size``, uninitialized, to send from or to receive into."""


class AllGather(Comm):
    """Brings the shards of a group."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor``, 1-D, with the ``input_tensor`` of all ranks in order; the input is its own part of
        it. With ``async_op`` a work to wait for may be returned; without, or with ``None``, all is done on return,
        or, on an accelerator, ordered in its current stream."""


class ReduceScatter(Comm):
    """Reduces the gradients of a group."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor``, 1-D, with this rank's part of the inputs of all ranks reduced with ``op``."""


class _Allocator:
    """Buffers from torch's usual allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class DefaultAllGather(_Allocator, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


class DefaultReduceScatter(_Allocator, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class _ProcessGroupAllocator:
    """Buffers from the process group's own allocator, where it has one for the device (NCCL: zero-copy transfers)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch_compat.allocate_from_process_group(self._group, math.prod(size), dtype, device)
        return torch.empty(*size, dtype=dtype, device=device) if made is None else made.view(*size)


class ProcessGroupAllGather(_ProcessGroupAllocator, DefaultAllGather):
    pass


class ProcessGroupReduceScatter(_ProcessGroupAllocator, DefaultReduceScatter):
    pass


class _SymmetricMemoryAllocator:
    """Buffers from a pool of symmetric memory, which all ranks of the group map and know of each other's."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._group = group
        torch_compat.use_symmetric_memory(backend)
        dist.barrier(group)  # makes the communicator, without which the ranks cannot find each other's buffers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch_compat.symmetric_memory_pool(device):
            buffer = torch.empty(*size, dtype=dtype, device=device)
        torch_compat.rendezvous(buffer, self._group)
        return buffer


class SymmetricMemoryAllGather(_SymmetricMemoryAllocator, DefaultAllGather):
    pass


class SymmetricMemoryReduceScatter(_SymmetricMemoryAllocator, DefaultReduceScatter):
    pass
