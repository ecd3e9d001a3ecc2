"""Says before a run how a step will go: its time, what communication is exposed, and what fills the memory.

    factory ─ model on meta ─ fully_shard ─ fake tensors ─ torch.compile ─ graphs before and after the passes
                                                                              │               │
    world size ─ fake process group                             hardware ─ bounds        simulation

Nothing but a batch is allocated and nothing is sent: the process is rank 0 of ranks that do not exist, and tensors have
no data, so a model of any size fits anywhere. What is planned is what ``torch.compile`` does on such ranks: the same
passes run on equal graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from . import backend, torch_compat
from .factory import BY_FACTORY, Factory, FactoryError, arguments, call, loss_of, shard
from .passes import PassConfig, PassContext, Result, Traffic, bounds, copy_graph, evaluate, run_parts
from .passes.machine import cost_model

OPTIMIZER = "optimizer state"  # a category of memory, beside those of ``passes.memory``
PARTS = ("forward", "backward")
OPTIMIZER_STATES = 2  # tensors that Adam keeps for each parameter, of its size and dtype


@dataclass(frozen=True)
class Plan:
    """How a step will go on one number of ranks, in simulation. Bytes are those of one rank.

    Attributes:
        world_size: number of ranks.
        replicas: that hold the same shards; 1 if each rank has its own.
        sharding: what was sharded, in words.
        result: of the simulation, beside the bounds.
        optimizer_bytes: that Adam keeps from step to step.
        traffic: collectives in the forward and in the backward.
    """

    world_size: int
    replicas: int
    sharding: str
    result: Result
    optimizer_bytes: int
    traffic: tuple[Traffic, Traffic]

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return self.result.memory.peak + self.optimizer_bytes

    @property
    def least_peak(self) -> int:
        """Bytes below which no plan can stay."""
        return self.result.bounds.memory + self.optimizer_bytes

    @property
    def least_exposed(self) -> float:
        """Seconds of exposed communication below which no plan with this compute can stay; 0 if there need be none."""
        return max(0.0, self.result.bounds.time_step - self.result.timeline.compute_seconds)

    @property
    def composition(self) -> dict[str, int]:
        """What fills the memory at the fullest moment: bytes by category."""
        memory = self.result.memory
        return {**memory.composition(memory.peak_position), OPTIMIZER: self.optimizer_bytes}


def make_plan(
    factory: Factory, world_size: int, config: PassConfig | None = None, replicas: int = 1, **how: Any
) -> Plan:
    """Plan a step of a model on ``world_size`` ranks.

    Args:
        factory: as ``factory`` describes it. It is called with ``meta`` as default device, so what it makes without
            naming a device takes no memory. What this process has compiled before is forgotten.
        config: of the passes; its ``hardware`` says what is simulated, by default an H100.
        replicas: hold the same shards (HSDP); divides ``world_size``.
        how: further arguments of ``fully_shard``, for a model that the factory has not sharded.

    Raises:
        FactoryError: the factory does not keep to its protocol.
        RuntimeError: there is a process group already.
        ValueError: the ranks do not divide into the replicas, or there is no such hardware profile.
        torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError: the model does not compile into one graph.
    """
    (plan,) = make_plans(factory, world_size, [config or PassConfig()], replicas, **how)
    return plan


def make_plans(
    factory: Factory, world_size: int, configs: Sequence[PassConfig], replicas: int = 1, **how: Any
) -> list[Plan]:
    """Plan a step for each of ``configs``, which may differ in what passes do after partitioning; traces once.

    Other arguments and errors are those of ``make_plan``.
    """
    first, *others = (replace(config, hardware=config.hardware or "h100") for config in configs)
    with model_without_data(factory, world_size, first, replicas, **how) as (model, batch, sharding):
        stages = _trace(model, batch)
        made = [_plan(stages, first), *(_plan(_passed(stages, config), config) for config in others)]
    optimizer_bytes = _optimizer_bytes(model)
    return [Plan(world_size, replicas, sharding, result, optimizer_bytes, traffic) for result, traffic in made]


def _passed(stages: dict[str, Graph], config: PassConfig) -> dict[str, Graph]:
    """What the passes make of a traced step by another configuration."""
    found: dict[str, Graph] = {}
    forward, backward = (copy_graph(stages[f"{part} before"]) for part in PARTS)
    context = PassContext(config, lambda stage, graph: found.update({stage: copy_graph(graph)}))
    run_parts(forward, backward, context)
    return found


def _plan(stages: dict[str, Graph], config: PassConfig) -> tuple[Result, tuple[Traffic, Traffic]]:
    before, after = ([stages[f"{part} {when}"] for part in PARTS] for when in ("before", "after"))
    costs = cost_model(after, config.hardware)
    forward, backward = map(Traffic.of, after)
    return evaluate(after, costs, bounds(before, costs)), (forward, backward)


@contextmanager
def model_without_data(
    factory: Factory, world_size: int, config: PassConfig, replicas: int = 1, **how: Any
) -> Iterator[tuple[nn.Module, Any, str]]:
    """Inside, be rank 0 of ranks that do not exist: the sharded model, a batch, and what was sharded, in words.

    Arguments and errors are those of ``make_plan``, but that nothing is compiled yet.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan is made without ranks; destroy the process group first, or use another process")
    if world_size < 2 or replicas < 1 or world_size % replicas or world_size == replicas:
        raise ValueError(f"{world_size} ranks do not divide into {replicas} replicas of two shards or more")
    with torch_compat.imaginary_world(world_size), backend.configured(**vars(config)):
        if replicas > 1:
            mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replica", "shard"))
            how = {"mesh": mesh, **how}
        with torch.device("meta"):
            model, make_batch = call(factory)
        sharding = shard(model, **how)
        if sharding == BY_FACTORY and (replicas > 1 or how.get("reshard_after_forward") is not None):
            raise FactoryError("the factory has sharded its model: its mesh, and what it reshards, are its own choice")
        torch.compiler.reset()
        try:
            yield model, make_batch(1, 0, world_size), sharding
        finally:
            torch.compiler.reset()


def run_step(model: nn.Module, batch: Any, fullgraph: bool = True) -> None:
    """Compile a step of a model without data, and run it."""
    with torch_compat.fake_tensors():
        model.to_empty(device="cpu")
        args, kwargs = arguments(batch, torch.device("cpu"))
        loss_of(torch.compile(model, backend="fsdp_eager", fullgraph=fullgraph)(*args, **kwargs)).backward()


def _trace(model: nn.Module, batch: Any) -> dict[str, Graph]:
    """The graphs of a step by stage; "before" and "after" our passes."""
    stages: dict[str, Graph] = {}
    with backend.observed(lambda stage, graph: stages.update({stage: copy_graph(graph)})):
        run_step(model, batch)
    if "forward after" not in stages:
        raise FactoryError("no parameter of the factory's model gets a gradient")
    return stages


def _optimizer_bytes(model: nn.Module) -> int:
    trained = (param for param in model.parameters() if param.requires_grad)
    local = (param.to_local() if isinstance(param, DTensor) else param for param in trained)
    return OPTIMIZER_STATES * sum(tensor.numel() * tensor.itemsize for tensor in local)
