"""What a user may ask of precision and of where shards live."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each step of a sharded module works in. The sharded parameter keeps its own dtype.

    Attributes:
        param_dtype: dtype of the all-gather and of the unsharded parameter, hence of forward and backward compute.
            ``None``: the parameter's own dtype. Parameters that are not floating point are never cast.
        reduce_dtype: dtype of the gradient reduction and of gradients accumulated without reduction.
            ``None``: the dtype that the gradient was computed in.
        output_dtype: floating-point outputs of the module's forward are cast to it. ``None``: left alone.
        cast_forward_inputs: whether floating-point inputs of the forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards live on the compute device. Base class of the other policies."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer states live in host memory.

    Attributes:
        pin_memory: keep the shards in page-locked memory, so that copies to the device overlap with compute.
    """

    pin_memory: bool = True
