"""The sharded ``Emulated`` with its schedule written by hand: what a graph with one bucket a layer does at best.

    forward     gather i + 1 ─ wait i ─ layer i
    backward    gather i - 1 ─ wait i ─ layer i backward ─ wait for the reduction of i + 1 ─ reduce i

One gather for each matrix, without a copy, and one reduction for each layer, as in SimpleFSDP's graphs; the gather is
the one that our graphs have on gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from emulated_compute import Emulated, Layer, linear, linear_backward
from torch import Tensor

from fsdp_compile.passes import GATHER

c10d = torch.ops._c10d_functional


class HandScheduled(nn.Module):
    """A rank's part of an ``Emulated``, of which each matrix is sharded by rows; equal shards only."""

    def __init__(self, whole: Emulated) -> None:
        super().__init__()
        self.layers: list[Layer] = [*whole.blocks]  # type: ignore[list-item]
        rank, world = dist.get_rank(), dist.get_world_size()
        for layer in self.layers:
            for name, weight in layer.named_parameters():
                setattr(layer, name, nn.Parameter(weight.detach().chunk(world)[rank].clone()))
        self.blocks = nn.ModuleList(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return _Step.apply(x, self.layers, *self.parameters())


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Layer], *shards: Tensor) -> Tensor:
        ctx.layers, ctx.saved = layers, []
        coming = _gather(layers[0])
        for at, layer in enumerate(layers):
            arriving, coming = coming, _gather(layers[at + 1]) if at + 1 < len(layers) else []
            first, second = map(c10d.wait_tensor, arriving)
            hidden = linear(x, first, layer.seconds)
            ctx.saved.append((x, hidden))
            x = x + linear(hidden, second, layer.seconds)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layers, found = ctx.layers, []
        coming, reducing = _gather(layers[-1]), None
        for at in reversed(range(len(layers))):
            arriving, coming = coming, _gather(layers[at - 1]) if at else []
            (x, hidden), seconds = ctx.saved.pop(), layers[at].seconds
            first, second = map(c10d.wait_tensor, arriving)
            through, grad_second = linear_backward(grad, hidden, second, seconds)
            through, grad_first = linear_backward(through, x, first, seconds)
            grad = grad + through
            if reducing is not None:
                found.append(c10d.wait_tensor(reducing))
            reducing = _reduce([grad_first, grad_second])
        found.append(c10d.wait_tensor(reducing))
        return grad, None, *(part for both in reversed(found) for part in both.chunk(2))


def _gather(layer: Layer) -> list[Tensor]:
    """Launch the gathers of this rank's shards."""
    return [GATHER(shard.detach(), _world(), _group()) for shard in (layer.first, layer.second)]


def _reduce(grads: Sequence[Tensor]) -> Tensor:
    """Launch the mean over ranks of this rank's shards, one behind the other."""
    world = _world()
    by_rank = torch.cat([part for parts in zip(*(grad.chunk(world) for grad in grads), strict=True) for part in parts])
    return c10d.reduce_scatter_tensor(by_rank, "avg", world, _group())


def _world() -> int:
    return dist.get_world_size()


def _group() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
