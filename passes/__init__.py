"""The pass pipelines, in order.

On the joint graph of forward and backward, before the compiler partitions it:

1. ``regather``: what is freed after forward is gathered again in the backward.

On the backward graph, after partitioning:

2. ``accumulate``: one reduction for each parameter, however often its module ran.

On the forward graph, the backward graph, and a graph that has no backward:

3. ``bucket``: one gather for each group and run of its module, one reduction for each group.

A pass is a function ``(graph, context) -> report``. It changes the graph in place, leaves it lint-clean and in
topological order, does nothing when run again, and reads tags only (``graph_view``): it serves any graph whose nodes
are tagged so, whoever traced it. Nothing in here imports the runtime.

Around the passes: ``context`` (what they are told and report), ``graph_view`` (what they read), ``skeleton`` (prints a
graph's communication for people), ``torch_compat`` (private torch APIs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Graph

from .accumulate import accumulate
from .bucket import bucket
from .context import Observer, PassConfig, PassContext, Report, Traffic
from .graph_view import gathers_repeat, has_backward, tag_digest
from .regather import regather
from .skeleton import print_skeleton

__all__ = [
    "Observer",
    "PassConfig",
    "PassContext",
    "Report",
    "Traffic",
    "accumulate",
    "bucket",
    "gathers_repeat",
    "has_backward",
    "print_skeleton",
    "regather",
    "run_backward",
    "run_forward",
    "run_inference",
    "run_joint",
    "tag_digest",
]

Pass = Callable[[Graph, PassContext], Report]


def run_joint(graph: Graph, context: PassContext) -> None:
    """Run the passes on a joint graph of forward and backward."""
    _run("joint", (regather,), graph, context)


def run_forward(graph: Graph, context: PassContext) -> None:
    """Run the passes on a forward graph, partitioned from a joint graph."""
    _run("forward", _bucketing(context), graph, context)


def run_backward(graph: Graph, context: PassContext) -> None:
    """Run the passes on a backward graph, partitioned from a joint graph."""
    _run("backward", (accumulate, *_bucketing(context)), graph, context)


def run_inference(graph: Graph, context: PassContext) -> None:
    """Run the passes on a graph that has no backward."""
    _run("inference", (regather, *_bucketing(context)), graph, context)


def _bucketing(context: PassContext) -> tuple[Pass, ...]:
    return (bucket,) if context.config.bucket else ()


def _run(stage: str, pipeline: Iterable[Pass], graph: Graph, context: PassContext) -> None:
    context.observe(f"{stage} before", graph)
    for each in pipeline:
        context.reports.append(each(graph, context))
    context.observe(f"{stage} after", graph)
