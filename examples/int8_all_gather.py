"""Sends weights as int8 in the all-gather, a quarter of the bytes, by a tensor subclass with two methods.

    python examples/int8_all_gather.py              two ranks on this machine's CPU

Each row of a weight travels as int8 with one float32 scale; the optimizer goes on working on float32 shards. The
gradient goes back in full precision, as if the rounding were not there (a straight-through estimator: Bengio et al.,
https://arxiv.org/abs/1308.3432).
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from fsdp_compile import fully_shard
from fsdp_compile.local_ranks import run_ranks

STEPS = 20
STAYS = {"detach", "clone", "new_zeros", "slice", "split", "view", "as_strided", "_to_copy"}  # results are of the class


class Wrapper(torch.Tensor):
    """A tensor of a class of its own, and kept so by all operations that sharding needs; compute sees what it wraps."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.wrapped = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Wrapper:
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Wrapper, lambda t: t.wrapped, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return args[0]
        return tree_map_only(torch.Tensor, cls, result) if name in STAYS else result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.wrapped})"


class Int8Gathered(Wrapper):
    """A matrix of size (rows, columns) that is all-gathered as int8 with a float32 scale for each row."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        """What this rank sends of its shard; as it does not pad, the ranks must divide the rows."""
        exact = self.wrapped.float()  # in bfloat16 the largest weight might be rounded up to 128, which is no int8
        scale = (exact.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return ((exact / scale[:, None]).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The weight that compute reads, in ``param_dtype``; with ``out``, put into it."""
        rows, scale = outputs
        weight = rows.to(param_dtype).mul_(scale[:, None])
        if out is None:
            return weight, (weight,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(weight)
        return None


def gather_as_int8(model: nn.Module) -> None:
    """Have the weights of all linear layers travel as int8; before ``fully_shard``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Gathered(module.weight.detach()))


def train_rank(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    losses = {name: train(rank, as_int8=name == "int8") for name in ("float32", "int8")}
    if rank == 0:
        print("step   float32      int8")
        for step in range(0, STEPS, 5):
            print(f"{step:4}{losses['float32'][step]:10.5f}{losses['int8'][step]:10.5f}")
    dist.destroy_process_group()


def train(rank: int, as_int8: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if as_int8:
        gather_as_int8(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(STEPS):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(train_rank, 2, f"file://{directory}/rendezvous")
