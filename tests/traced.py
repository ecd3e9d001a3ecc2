"""Trains models that take and return anything, eagerly or compiled, and tells what each step gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from fake_world import Stages
from models import Net, assert_same, batch, local, my_part

from fsdp_compile import backend
from fsdp_compile.passes import copy_graph


class SmallBlock(nn.Module):
    """Compiles in half the time of ``models.Block``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class SmallNet(Net):
    block = SmallBlock


def compiled(model: nn.Module, **arguments: Any) -> Callable[..., Any]:
    return torch.compile(model, **{"backend": "fsdp_eager", "fullgraph": True, **arguments})


def reset() -> None:
    """Forget all graphs, and how many there were."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def flat(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Append the tensors in ``value``, in order; returns all else about it, which can be compared."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor", value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), [flat(item, tensors) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), [flat(getattr(value, name), tensors) for name in names]
    if isinstance(value, dict):
        return type(value), {key: flat(item, tensors) for key, item in value.items()}
    return value


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else local(param.grad).clone() for param in model.parameters()]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local(param.detach()).clone() for param in model.parameters()]


def loss_of(output: Any) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    flat(output, tensors)
    return sum((i + 1) * t.float().square().mean() for i, t in enumerate(t for t in tensors if t.requires_grad))


class Training:
    """A model, the optimizer that it needs, and what its steps have given so far."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any] | None = None) -> None:
        self.model = model
        self.forward = model if forward is None else forward
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.history: list[list[torch.Tensor | None]] = []
        self.forms: list[Any] = []

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and keep what it returned."""
        output = self.forward(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        self.forms.append(flat(output, tensors))
        self.history.append([tensor.detach().clone() for tensor in tensors])
        return output

    def backward(self, *losses: torch.Tensor) -> None:
        for loss in losses:
            loss.backward()
        self.history.append([*(loss.detach() for loss in losses), *gradients(self.model)])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(weights(self.model))

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.backward(loss_of(self.call(*args, **kwargs)))
        self.update()

    def steps(self, *steps: int) -> Training:
        for step in steps:
            self.step(my_part(batch(step)))
        return self


def assert_equal(a: Training, b: Training) -> None:
    assert a.forms == b.forms
    assert_same(a.history, b.history)


@contextmanager
def graphs() -> Iterator[Stages]:
    """Copies of the graphs compiled inside, each with the name of its stage."""
    stages: Stages = []
    with backend.observed(lambda stage, graph: stages.append((stage, copy_graph(graph)))):
        yield stages


def of_stage(stages: Stages, name: str) -> list[torch.fx.Graph]:
    return [graph for stage, graph in stages if stage == name]
