"""Train one model under this library's ``fully_shard`` and under torch's, and compare all that training computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Net, batch, local, my_part, shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile

LIBRARIES = (fsdp_compile, torch_fsdp)
Data = Callable[[int], torch.Tensor]  # from a number to a batch: this rank's part, or for one process the whole
Iterate = Callable[[Any, int, Data], list[torch.Tensor]]  # forwards and backwards of one step; what else to compare
Record = dict[str, torch.Tensor | None]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def one_batch(model: nn.Module, step: int, data: Data) -> list[torch.Tensor]:
    loss = loss_of(model(data(step)))
    loss.backward()
    return [loss]


def api_of(library: Any) -> Callable[..., Any]:
    """``fully_shard`` of ``library``, which takes policies as dicts and makes them of the library's own classes."""

    def fully_shard(
        module: Any, mp_policy: dict[str, Any] | None = None, dp_mesh_dims: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        if mp_policy is not None:
            kwargs["mp_policy"] = library.MixedPrecisionPolicy(**mp_policy)
        if dp_mesh_dims is not None:
            kwargs["dp_mesh_dims"] = library.DataParallelMeshDims(**dp_mesh_dims)
        return library.fully_shard(module, **kwargs)

    return fully_shard


def build(library: Any, make: Callable[[], nn.Module] = Net, apply: Callable[..., Any] = shard, **kwargs: Any) -> Any:
    """A model of ``make``, always with the same weights, sharded by ``apply(model, fully_shard, **kwargs)``."""
    torch.manual_seed(0)
    return apply(make(), api_of(library), **kwargs)


def train(
    model: nn.Module, iterate: Iterate = one_batch, steps: int = 3, data: Data = lambda i: my_part(batch(i))
) -> list[Record]:
    """Train with Adam; for each step what ``iterate`` returned, every gradient, and every parameter afterwards."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        record: Record = {f"result {i}": x.detach().clone() for i, x in enumerate(iterate(model, step, data))}
        for name, param in model.named_parameters():
            record[f"gradient of {name}"] = None if param.grad is None else param.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        record.update((f"parameter {name}", param.detach().clone()) for name, param in model.named_parameters())
        history.append(record)
    return history


def side_by_side(
    make: Callable[[], nn.Module] = Net,
    configure: Callable[[Any], Any] = lambda model: None,
    iterate: Iterate = one_batch,
    steps: int = 3,
    **kwargs: Any,
) -> list[Record]:
    """Train under both libraries and assert that all is equal, bit for bit; returns what this library computed."""
    histories = []
    for library in LIBRARIES:
        model = build(library, make, **kwargs)
        configure(model)
        histories.append(train(model, iterate, steps))
    assert_same(*histories)
    return histories[0]


def one_process(make: Callable[[], nn.Module] = Net, iterate: Iterate = one_batch, steps: int = 3) -> list[Record]:
    """Train a plain model on the batches of all ranks together."""
    torch.manual_seed(0)
    return train(make(), iterate, steps, batch)


def describe(value: torch.Tensor | None) -> tuple[Any, ...]:
    if value is None:
        return (None,)
    sharding = (value.placements, value.device_mesh.shape) if isinstance(value, DTensor) else None
    return value.dtype, value.shape, sharding


def assert_same(ours: list[Record], theirs: list[Record]) -> None:
    """Equal kinds, dtypes, shapes, placements and, bit for bit, local values."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert list(mine) == list(other)
        for name, value in mine.items():
            where = f"step {step}, {name}"
            assert describe(value) == describe(other[name]), f"{where}: {describe(value)} != {describe(other[name])}"
            equal = value is None or torch.equal(local(value), local(other[name]))
            assert equal, f"{where}: {value} != {other[name]}"


def assert_close(ours: list[Record], single: list[Record], scale: float = 1.0) -> None:
    """Gradients and parameters, put together again, are those of one process; or gradients only, ``scale`` times."""
    kinds = ("result", "parameter") if scale != 1 else ("result",)
    for step, (mine, other) in enumerate(zip(ours, single, strict=True)):
        for name in (name for name in other if not name.startswith(kinds)):
            value, expected, where = mine[name], other[name], f"step {step}, {name}"
            assert (value is None) == (expected is None), f"{where}: {value} and {expected}"
            if value is not None:
                full = value.full_tensor() if isinstance(value, DTensor) else value
                close = torch.allclose(full, expected * scale, rtol=1e-4, atol=1e-5)
                assert close, f"{where}: {full} is not {scale} times {expected}"


class Collectives(TorchDispatchMode):
    """Lists the collectives issued inside: what each does, over how many ranks, and how many elements it yields."""

    KINDS = {
        "_allgather_base_": "gather",
        "allgather_into_tensor_coalesced_": "gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            outputs = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.issued.append((self.KINDS.get(name, name), sum(output.numel() for output in outputs)))
        return func(*args, **(kwargs or {}))
