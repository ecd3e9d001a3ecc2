"""The passes' own operators: to pack tensors for a collective and unpack what it brings, and a gather for gloo.

    pack([a, b], rows=2, dtype, divisor)        a0 a1 ─┐      row 0   a0 b0
                                                b0 b1 ─┴─>    row 1   a1 b1      flat, of ``dtype``, each / divisor

    unpack(packed, rows=2, [2, 2], [1, 1])      row 0   a0 b0        a0 a1
                                                row 1   a1 b1   ->   b0 b1      each in memory of its own

One row packs shards for a gather one after the other; a row for each rank packs gradients for a reduce-scatter.
Dimension 0 of each tensor must divide into the rows. Run operator by operator, it reads and writes each element once,
but for the division, which is in place. Inductor generates code as for a concatenation: with what comes before fused.
To pack casts and divides on the way. To unpack takes the sizes of all results one after the other, and how many of
them belong to each.

    gather(shard, ranks, group)                 the same as the functional all-gather, waited for in the same way
    own_part(whole, ranks, group)               a copy of this rank's part; graphs are alike on all ranks

torch runs functional all-gathers, of one tensor or of many, as what gloo calls ``ALLGATHER_COALESCED``. Each of gloo's
threads notes the name of what it started and of what it completed in a string that they share, without a lock. Names of
more than 15 characters are on the heap, so now and then two threads free the same memory, and the process dies or goes
on with a corrupt heap. An all-gather into a tensor that is made before has a shorter name, and so have reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from .torch_compat import c10d, copy_all, inductor_lowerings, launch_by_inductor, rank_in

aten, prims = torch.ops.aten, torch.ops.prims

_library = torch.library.Library("fsdp_passes", "FRAGMENT")
_library.define("pack(Tensor[] tensors, int rows, ScalarType dtype, float divisor) -> Tensor")
_library.define("unpack(Tensor packed, int rows, int[] sizes, int[] dims) -> Tensor[]")
_library.define("gather(Tensor shard, int ranks, str group) -> Tensor")
_library.define("own_part(Tensor whole, int ranks, str group) -> Tensor")

PACK = torch.ops.fsdp_passes.pack.default
UNPACK = torch.ops.fsdp_passes.unpack.default
GATHER = torch.ops.fsdp_passes.gather.default
OWN_PART = torch.ops.fsdp_passes.own_part.default


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


@torch.library.impl(_library, "unpack", "CompositeExplicitAutograd")
def _unpack(packed: torch.Tensor, rows: int, sizes: Sequence[int], dims: Sequence[int]) -> list[torch.Tensor]:
    made = _like_unpacked(packed, rows, sizes, dims)
    parts = packed.view(rows, -1).split([tensor.numel() // rows for tensor in made], dim=1)
    copy_all([tensor.view(rows, -1) for tensor in made], list(parts))
    return made


@torch.library.register_fake("fsdp_passes::unpack", lib=_library)
def _like_unpacked(packed: torch.Tensor, rows: int, sizes: Sequence[int], dims: Sequence[int]) -> list[torch.Tensor]:
    return [packed.new_empty(shape) for shape in _shapes(sizes, dims)]


def _shapes(sizes: Sequence[int], dims: Sequence[int]) -> list[list[int]]:
    remaining = iter(sizes)
    return [list(islice(remaining, count)) for count in dims]


@torch.library.impl(_library, "gather", "CompositeExplicitAutograd")
def _gather(shard: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return c10d.all_gather_into_tensor_out(shard, ranks, group, out=_like_gathered(shard, ranks, group))


@torch.library.register_fake("fsdp_passes::gather", lib=_library)
def _like_gathered(shard: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return shard.new_empty((shard.size(0) * ranks, *shard.shape[1:]))


@torch.library.impl(_library, "own_part", "CompositeExplicitAutograd")
def _own_part(whole: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return whole.chunk(ranks)[rank_in(group)].clone()


@torch.library.register_fake("fsdp_passes::own_part", lib=_library)
def _(whole: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return whole.new_empty((whole.size(0) // ranks, *whole.shape[1:]))


def teach_inductor() -> None:
    """Have Inductor generate code for those that are worth it. May be called again."""
    lowerings, register = inductor_lowerings()
    if PACK not in lowerings:
        register(PACK, type_promotion_kind=None)(_packed_by_inductor)
        register(GATHER, type_promotion_kind=None)(partial(launch_by_inductor, GATHER))
        register(UNPACK, type_promotion_kind=None)(_unpacked_by_inductor)


def _packed_by_inductor(tensors: Sequence[Any], rows: int, dtype: torch.dtype, divisor: float) -> Any:
    lower, _ = inductor_lowerings()
    parts = [lower[prims.convert_element_type.default](tensor, dtype) for tensor in tensors]
    parts = parts if divisor == 1 else [lower[aten.div.Tensor](part, divisor) for part in parts]
    whole = lower[aten.cat.default]([lower[aten.reshape.default](part, [rows, -1]) for part in parts], 1)
    return lower[aten.reshape.default](whole, [-1])


def _unpacked_by_inductor(packed: Any, rows: int, sizes: Sequence[int], dims: Sequence[int]) -> list[Any]:
    lower, _ = inductor_lowerings()
    shapes = _shapes(sizes, dims)
    columns = [math.prod(shape) // rows for shape in shapes]
    parts = lower[aten.split_with_sizes.default](lower[aten.reshape.default](packed, [rows, -1]), columns, 1)
    return [
        lower[aten.clone.default](lower[aten.reshape.default](part, shape))
        for part, shape in zip(parts, shapes, strict=True)
    ]
