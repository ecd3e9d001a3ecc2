"""The operator that packs tensors for a collective, casting and dividing them on the way.

    pack([a, b], rows=2, dtype, divisor)        a0 a1 ─┐      row 0   a0 b0
                                                b0 b1 ─┴─>    row 1   a1 b1      flat, of ``dtype``, each / divisor

One row packs shards for a gather one after the other; a row for each rank packs gradients for a reduce-scatter.
Dimension 0 of each tensor must divide into the rows. Run operator by operator, it reads and writes each element once,
but for the division, which is in place. Inductor generates code as for a concatenation: with what comes before fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .torch_compat import copy_all, inductor_lowerings

aten, prims = torch.ops.aten, torch.ops.prims

_library = torch.library.Library("fsdp_passes", "FRAGMENT")
_library.define("pack(Tensor[] tensors, int rows, ScalarType dtype, float divisor) -> Tensor")

PACK = torch.ops.fsdp_passes.pack.default


@torch.library.impl(_library, "pack", "CompositeExplicitAutograd")
def _pack(tensors: Sequence[torch.Tensor], rows: int, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    lengths = [tensor.numel() // rows for tensor in tensors]
    packed = tensors[0].new_empty((rows, sum(lengths)), dtype=dtype)
    shapes = [(rows, tensor.size(0) // rows, *tensor.shape[1:]) for tensor in tensors]
    places = [part.view(shape) for part, shape in zip(packed.split(lengths, dim=1), shapes, strict=True)]
    copy_all(places, [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)])
    return (packed if divisor == 1 else packed.div_(divisor)).view(-1)


@torch.library.register_fake("fsdp_passes::pack", lib=_library)
def _(tensors: Sequence[torch.Tensor], rows: int, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)


def teach_inductor() -> None:
    """Have Inductor generate code for the operator. May be called again."""
    lowerings, register = inductor_lowerings()
    if PACK not in lowerings:
        register(PACK, type_promotion_kind=None)(_lowered)


def _lowered(tensors: Sequence[Any], rows: int, dtype: torch.dtype, divisor: float) -> Any:
    lower, _ = inductor_lowerings()
    parts = [lower[prims.convert_element_type.default](tensor, dtype) for tensor in tensors]
    parts = parts if divisor == 1 else [lower[aten.div.Tensor](part, divisor) for part in parts]
    whole = lower[aten.cat.default]([lower[aten.reshape.default](part, [rows, -1]) for part in parts], 1)
    return lower[aten.reshape.default](whole, [-1])
