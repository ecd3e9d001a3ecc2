"""A world of any number of ranks in one process, whose collectives move no data, and what compiling in it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import backend
from fsdp_compile.factory import loss_of
from fsdp_compile.passes import copy_graph, print_skeleton


@contextmanager
def fake_world(size: int = 2, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one of ``size`` ranks, the others of which do not exist."""
    assert not dist.is_initialized()
    torch.compiler.reset()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


Stages = list[tuple[str, Graph]]


def unscheduled() -> AbstractContextManager[None]:
    """Inside, collectives stay where they were traced."""
    return backend.configured(schedule=False)


def run_step(model: Callable[..., Any], *inputs: Any) -> None:
    """One forward, and one backward if grad mode is on."""
    output = model(*inputs)
    if torch.is_grad_enabled():
        loss_of(output).backward()


def graphs_of(model: torch.nn.Module, *inputs: Any, backend_name: str = "fsdp_eager", **options: Any) -> Stages:
    """Compile one training step, or one forward without grad mode; a copy of the graph of each stage, in order.

    Stages are "joint", "forward", "backward" or "inference", each "before" and "after" the passes.
    """
    stages: Stages = []
    with backend.observed(lambda stage, graph: stages.append((stage, copy_graph(graph)))):
        run_step(torch.compile(model, backend=backend_name, fullgraph=True, **options), *inputs)
    return stages


def skeletons_of(stages: Stages) -> str:
    """The communication skeleton of each stage, under its name."""
    return "\n".join(f"== {stage} the passes ==\n\n{print_skeleton(graph)}" for stage, graph in stages)


def text_of(graph: Graph) -> str:
    """All that decides what a graph computes, as Python code."""
    return graph.python_code("self").src
