"""Trains two equal copies of a model, one eagerly and one compiled, and measures how far apart they drift.

``factory`` says what describes the model. The factory is called twice under one seed, and each step begins with a seed
of its own, so both copies start equal and draw the same random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import torch_compat
from .factory import Factory, FactoryError, arguments, call, debug_llama, loss_of, shard

__all__ = ["Difference", "ParityReport", "StepParity", "compare_training", "debug_llama"]


# -- what is reported -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference between two sets of tensors, and the name of the tensor that has it.

    ``value`` is infinite where the difference is not a number: a tensor, or a NaN, on one side only. ``name`` is empty
    if there is no difference at all.
    """

    value: float = 0.0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.name})" if self.name else f"{self.value:.3g}"


@dataclass(frozen=True)
class StepParity:
    """One training step, the worst of all ranks.

    Attributes:
        step: counted from 1.
        loss: absolute difference of the losses.
        gradient: largest difference of a gradient, before the optimizer's step.
        parameter: largest difference of a parameter or a buffer, after it.
        bitwise_equal: whether all of these have equal bits; unlike a difference of 0, this tells 0 from -0.
    """

    step: int
    loss: float
    gradient: Difference
    parameter: Difference
    bitwise_equal: bool


@dataclass(frozen=True)
class ParityReport:
    """What ``compare_training`` found; alike on all ranks.

    Attributes:
        backend: of ``torch.compile``.
        world: number of ranks.
        device: type of the device that computed.
        sharding: what was sharded, in words.
        steps: one entry for each step.
        graphs, graph_breaks, recompiles: what Dynamo counted, the largest of all ranks.
    """

    backend: str
    world: int
    device: str
    sharding: str
    steps: tuple[StepParity, ...]
    graphs: int
    graph_breaks: int
    recompiles: int

    @property
    def bitwise_equal(self) -> bool:
        """Whether both copies had equal losses, gradients, parameters and buffers in every step, bit for bit."""
        return all(step.bitwise_equal for step in self.steps)

    def within(self, tolerance: float) -> bool:
        """Whether no loss, gradient, parameter or buffer ever differed by more than ``tolerance``."""
        values = [value for s in self.steps for value in (s.loss, s.gradient.value, s.parameter.value)]
        return all(value <= tolerance for value in values)

    def __str__(self) -> str:
        lines = [
            f"eager against backend {self.backend}, {self.world} rank{'s' * (self.world != 1)} on {self.device}",
            f"sharded: {self.sharding}",
            "step  loss difference  largest gradient difference, largest parameter difference",
        ]
        for step in self.steps:
            lines.append(f"{step.step:4}  {step.loss:<15.3g}  {step.gradient}, {step.parameter}")
        lines.append(f"graphs {self.graphs}, graph breaks {self.graph_breaks}, recompiles {self.recompiles}")
        lines.append(f"bitwise equal: {'yes' if self.bitwise_equal else 'no'}")
        return "\n".join(lines)


# -- comparing two trainings ------------------------------------------------------------------------------------------


def compare_training(
    factory: Factory,
    *,
    steps: int = 5,
    backend: str = "fsdp_eager",
    learning_rate: float = 1e-2,
    fullgraph: bool = True,
    seed: int = 0,
) -> ParityReport:
    """Train two copies of a model in lockstep, one eagerly and one compiled, and compare them after each step.

    Collective: every rank of the default process group calls it, with equal arguments. The optimizer is plain SGD, so
    that a difference of parameters is in proportion to the difference of gradients that caused it. Graphs that this
    process compiled before are dropped.

    Args:
        factory: makes the model and its batches; see the head of this module.
        steps: number of optimizer steps, at least 1.
        backend: of ``torch.compile``. ``"fsdp_eager"`` is to be bitwise equal; a code generator need not be.
        learning_rate: of SGD.
        fullgraph: have a graph break raise; otherwise it is counted.
        seed: of weights, batches and dropout.

    Returns:
        The differences, the largest of all ranks; equal on all ranks.

    Raises:
        FactoryError: the factory does not keep to its protocol.
        RuntimeError: there is no process group.
        ValueError: ``steps`` is less than 1.
    """
    if not dist.is_initialized():
        raise RuntimeError("compare_training needs a process group; call torch.distributed.init_process_group first")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    torch.compiler.reset()
    before = torch_compat.dynamo_counts()
    eager = _Training(factory, seed, learning_rate)
    compiled = _Training(factory, seed, learning_rate)
    _check_equal_start(eager.model, compiled.model)
    compiled.forward = torch.compile(compiled.model, backend=backend, fullgraph=fullgraph)
    mine = [_compare_step(eager, compiled, step) for step in range(1, steps + 1)]
    counts = tuple(now - then for now, then in zip(torch_compat.dynamo_counts(), before, strict=True))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, counts))
    agreed = [_worst(of_ranks) for of_ranks in zip(*(of_steps for of_steps, _ in everyone), strict=True)]
    graphs, graph_breaks, recompiles = (max(count) for count in zip(*(counts for _, counts in everyone), strict=True))
    return ParityReport(
        backend=backend,
        world=len(everyone),
        device=eager.device.type,
        sharding=eager.sharding,
        steps=tuple(agreed),
        graphs=graphs,
        graph_breaks=graph_breaks,
        recompiles=recompiles,
    )


class _Training:
    """One copy of the model and what trains it."""

    def __init__(self, factory: Factory, seed: int, learning_rate: float) -> None:
        self.seed = seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = _compute_device()
        _seed_all(seed)  # alike on all ranks: each takes its shard of the same weights
        self.model, self.make_batch = call(factory)
        self.sharding = shard(self.model)
        _check_parameters(self.model)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=learning_rate)
        self.forward: Callable[..., Any] = self.model

    def backward(self, step: int) -> torch.Tensor:
        """Forward and backward of one step; returns the loss."""
        _seed_all((self.seed + 1) * 1_000_003 + step * self.world + self.rank)
        args, kwargs = arguments(self.make_batch(step, self.rank, self.world), self.device)
        loss = loss_of(self.forward(*args, **kwargs))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _compare_step(eager: _Training, compiled: _Training, step: int) -> StepParity:
    losses = {"loss": eager.backward(step)}, {"loss": compiled.backward(step)}
    loss, same_loss = difference(*losses)
    gradient, same_gradients = difference(_gradients(eager.model), _gradients(compiled.model))
    eager.update()
    compiled.update()
    parameter, same_parameters = difference(_weights(eager.model), _weights(compiled.model))
    return StepParity(step, loss.value, gradient, parameter, same_loss and same_gradients and same_parameters)


def _worst(of_ranks: Iterable[StepParity]) -> StepParity:
    """The same step as all ranks saw it, as one."""
    ranks = list(of_ranks)
    return StepParity(
        ranks[0].step,
        max(rank.loss for rank in ranks),
        max((rank.gradient for rank in ranks), key=lambda each: each.value),
        max((rank.parameter for rank in ranks), key=lambda each: each.value),
        all(rank.bitwise_equal for rank in ranks),
    )


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _weights(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def difference(
    left: dict[str, torch.Tensor] | dict[str, torch.Tensor | None],
    right: dict[str, torch.Tensor] | dict[str, torch.Tensor | None],
) -> tuple[Difference, bool]:
    """Compare tensors of equal names: the largest difference, and whether all are bitwise equal.

    Of a ``DTensor`` this rank's shard is compared. ``None`` equals only ``None``.
    """
    largest, same_bits = Difference(), True
    for name in {**left, **right}:
        a, b = left.get(name), right.get(name)
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            what = "on one side only" if a is None or b is None else "of another shape or dtype"
            return Difference(math.inf, f"{name}, {what}"), False
        a, b = _local(a), _local(b)
        if _bits(a).equal(_bits(b)):
            continue
        same_bits = False
        value = _largest_difference(a, b)
        if value > largest.value:
            largest = Difference(value, name)
    return largest, same_bits


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0).max())


# -- what is refused ------------------------------------------------------------------------------------------------


def _check_parameters(model: nn.Module) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise FactoryError("the factory's model has no parameter that requires grad")
    for name, param in model.named_parameters():
        if param.is_meta:
            raise FactoryError(f"parameter {name} of the factory's model is on the meta device and has no data")


def _check_equal_start(eager: nn.Module, compiled: nn.Module) -> None:
    largest, same_bits = difference(_weights(eager), _weights(compiled))
    if not same_bits:
        raise FactoryError(
            f"two calls of the factory under one seed made different models: {largest.name or 'signs of zeros'} "
            f"differs by {largest.value:.3g}"
        )


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _compute_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
