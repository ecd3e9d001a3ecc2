"""Train one model under this library's ``fully_shard`` and under torch's, and compare all that training computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Net, batch, local, my_part, shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile

LIBRARIES = (fsdp_compile, torch_fsdp)
Data = Callable[[int], torch.Tensor]  # from a number to a batch: this rank's part, or for one process the whole
Iterate = Callable[[Any, int, Data], list[torch.Tensor]]  # forwards and backwards of one step; what else to compare
Record = dict[str, torch.Tensor | None]
Event = tuple[str, int, int]  # kind, elements of the larger end, ranks


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
    compare: Callable[[list[Event]], Any] | None = None,
    **kwargs: Any,
) -> list[Record]:
    """Train under both libraries and assert that all is equal, bit for bit; returns what this library computed.

    With ``compare``, what it makes of the events, the collectives and matrix products in order, must be equal too.
    """
    histories, events = [], []
    for library in LIBRARIES:
        model = build(library, make, **kwargs)
        configure(model)
        with Events() if compare else nullcontext(Collectives()) as recorder:
            histories.append(train(model, iterate, steps))
        events.append(compare(recorder.issued) if compare else None)
    assert_same(*histories)
    assert events[0] == events[1], f"{events[0]} != {events[1]}"
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
    """Gradients and parameters are this rank's shards of those of one process; or gradients only, ``scale`` times."""
    kinds = ("result", "parameter") if scale != 1 else ("result",)
    for step, (mine, other) in enumerate(zip(ours, single, strict=True)):
        for name in (name for name in other if not name.startswith(kinds)):
            value, expected, where = mine[name], other[name], f"step {step}, {name}"
            assert (value is None) == (expected is None), f"{where}: {value} and {expected}"
            if value is not None:
                close = torch.allclose(local(value), shard_like(value, expected) * scale, rtol=1e-4, atol=1e-5)
                assert close, f"{where}: {value} is not {scale} times {expected}"


def shard_like(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank would hold of ``whole`` if it were distributed as ``value`` is; no communication."""
    if not isinstance(value, DTensor):
        return whole
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None).to_local()


class Collectives(TorchDispatchMode):
    """Lists the collectives issued inside, in order: kind, elements before or after it, ranks."""

    KINDS = {
        "c10d::_allgather_base_": "gather",
        "c10d::allgather_into_tensor_coalesced_": "gather",
        "c10d::_reduce_scatter_base_": "reduce-scatter",
        "c10d::allreduce_": "all-reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [arg if isinstance(arg, list) else [arg] for arg in args[:2]]
            elements = max(sum(t.numel() for t in each if isinstance(t, torch.Tensor)) for each in tensors)
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            if group.size() > 1:
                self.issued.append((self.KINDS.get(func._schema.name, func._schema.name), elements, group.size()))
        return func(*args, **(kwargs or {}))


class Events(Collectives):
    """Lists the matrix products as well, between which collectives are issued."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in ("aten::addmm", "aten::mm"):
            self.issued.append(("product", result.numel(), 1))
        return result
