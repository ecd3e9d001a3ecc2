"""Every private torch API that the benchmarks touch, each with the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import compilation_time_metrics
from torch.fx import Graph, Node


def gather_asynchronously(module: Any) -> None:
    """Have torch's FSDP module start its all-gathers without waiting; on CPU there is no public way."""
    module._set_unshard_async_op(True)


def reset_compile_phases() -> None:
    compilation_time_metrics.clear()


def compile_phases() -> dict[str, float]:
    """Seconds of wall time that each phase of compiling took since the reset; the public form is a printed table."""
    return {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}


@contextmanager
def late_waits(seconds: float) -> Iterator[None]:
    """Inside, graphs sleep ``seconds`` before each wait for a collective; they call an operator, which has no hooks."""
    wait = torch.ops._c10d_functional.wait_tensor.default

    def late_wait(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return wait._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, tensor)

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        library.impl("wait_tensor", late_wait, "CPU")
        yield


def overlap_by_torch(graph: Graph, milliseconds: dict[Node, float]) -> Graph:
    """Inductor's own bucketing and overlap scheduling of a graph, which is changed.

    Args:
        graph: as traced.
        milliseconds: of each node, instead of its own estimates.

    Raises:
        ImportError: it needs Triton for estimates of its own, whatever it is given.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    estimate = {**milliseconds}.get
    module = schedule_overlap_bucketing(
        graph.owning_module,  # type: ignore[arg-type]
        collective_bucketing=True,
        compute_estimator="analytical",
        custom_runtime_estimation=lambda node, size: estimate(node),
    )
    return module.graph
