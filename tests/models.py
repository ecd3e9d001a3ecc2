"""Small models, and one way of training them, for tests that compare trainings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

warnings.filterwarnings("ignore", category=FutureWarning)

Shard = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers; ``out`` rows of the head set how evenly it shards."""

    block = Block

    def __init__(self, dim: int = 12, blocks: int = 2, out: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(self.block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedNet(Net):
    """The head and the first layer share one parameter, under two names."""

    def __init__(self, dim: int = 12, blocks: int = 2) -> None:
        super().__init__(dim, blocks, out=dim)
        self.head.weight = self.inp.weight


def shard(model: nn.Module, fully_shard: Shard, **kwargs: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def mesh_2d() -> DeviceMesh:
    """Two replicas of the shards."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def batch(step: int, dim: int = 12, rows: int = 8) -> torch.Tensor:
    """The batch of all ranks together, (rows, dim)."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(step))


def my_part(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(
    model: nn.Module,
    forward: Callable[..., torch.Tensor] | None = None,
    steps: int = 3,
    part: Callable[[torch.Tensor], torch.Tensor] = my_part,
    dim: int = 12,
) -> list[list[torch.Tensor | None]]:
    """Train with Adam; what each step gave: the loss, then every gradient, then every parameter after the step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        loss = (model if forward is None else forward)(part(batch(step, dim))).float().square().mean()
        loss.backward()
        record: list[torch.Tensor | None] = [loss.detach()]
        record += [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        history.append(record + [local(p.detach()).clone() for p in model.parameters()])
    return history


def assert_same(a: list[list[torch.Tensor | None]], b: list[list[torch.Tensor | None]]) -> None:
    """Bit for bit, and ``None`` for ``None``."""
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        for index, (x, y) in enumerate(zip(left, right, strict=True)):
            equal = x is y if x is None or y is None else torch.equal(x, y)
            assert equal, f"step {step}, item {index}: {x} != {y}"


def assert_close_to_one_process(sharded: nn.Module, single: nn.Module, steps: int = 3, dim: int = 12) -> None:
    """Train ``single`` on the whole batch and compare its weights with those of ``sharded``, already trained alike."""
    train(single, steps=steps, part=lambda whole: whole, dim=dim)
    for (name, mine), theirs in zip(sharded.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def live_bytes() -> int:
    """Bytes in the storages of all tensors that Python can reach."""
    import gc

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        tensor = local(thing) if isinstance(thing, torch.Tensor) else None
        if type(tensor) in (torch.Tensor, nn.Parameter):  # not the fake ones of the compiler
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
