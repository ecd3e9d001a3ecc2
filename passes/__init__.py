"""The pass pipelines, in order.

On the joint graph of forward and backward, before the compiler partitions it:

1. ``regather``: what is freed after forward is gathered again in the backward.

On the forward and the backward graph together, after partitioning:

2. ``keep_slices``: where fewer ranks keep a slice, it is saved for the backward, which gathers among them.

On the backward graph:

3. ``accumulate``: one reduction for each parameter, however often its module ran.

On the forward graph, the backward graph, and a graph that has no backward:

4. ``bucket``: one gather for each group and run of its module, one reduction for each group.

A pass is a function ``(graph, context) -> report``. It changes the graph in place, leaves it lint-clean and in
topological order, does nothing when run again, and reads tags only (``graph_view``): it serves any graph whose nodes
are tagged so, whoever traced it. Nothing in here imports the runtime.

Around the passes: ``context`` (what they are told and report), ``graph_view`` (what they read), ``skeleton`` (prints a
graph's communication for people), ``torch_compat`` (private torch APIs).

How good their result is: ``simulate`` (when everything happens, on ``costs``), ``memory`` (what is live, on
``storages``), ``bounds`` (what no plan can beat: ``time_bound`` and ``memory_bound``, on ``reach``), ``result`` (all of
it side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Graph

from .accumulate import accumulate
from .bounds import Bounds, bounds
from .bucket import bucket
from .context import Observer, PassConfig, PassContext, Report, Traffic, source_digest
from .costs import KindsApart
from .graph_view import gathers_repeat, has_backward, tag_digest
from .keep_slices import keep_slices
from .memory import MemoryProfile
from .regather import regather
from .result import Result, evaluate
from .simulate import Timeline, simulate
from .skeleton import print_skeleton

__all__ = [
    "Bounds",
    "KindsApart",
    "MemoryProfile",
    "Observer",
    "PassConfig",
    "PassContext",
    "Report",
    "Result",
    "Timeline",
    "Traffic",
    "accumulate",
    "bounds",
    "bucket",
    "evaluate",
    "gathers_repeat",
    "has_backward",
    "keep_slices",
    "print_skeleton",
    "regather",
    "run_inference",
    "run_joint",
    "run_parts",
    "simulate",
    "source_digest",
    "tag_digest",
]

Pass = Callable[[Graph, PassContext], Report]


def run_joint(graph: Graph, context: PassContext) -> None:
    """Run the passes on a joint graph of forward and backward."""
    context.observe("joint before", graph)
    _run("joint", (regather,), graph, context)


def run_parts(forward: Graph, backward: Graph, context: PassContext) -> None:
    """Run the passes on the two graphs partitioned from a joint graph."""
    context.observe("forward before", forward)
    context.observe("backward before", backward)
    context.reports.append(keep_slices(forward, backward, context))
    _run("forward", _bucketing(context), forward, context)
    _run("backward", (accumulate, *_bucketing(context)), backward, context)


def run_inference(graph: Graph, context: PassContext) -> None:
    """Run the passes on a graph that has no backward."""
    context.observe("inference before", graph)
    _run("inference", (regather, *_bucketing(context)), graph, context)


def _bucketing(context: PassContext) -> tuple[Pass, ...]:
    return (bucket,) if context.config.bucket else ()


def _run(stage: str, pipeline: Iterable[Pass], graph: Graph, context: PassContext) -> None:
    for each in pipeline:
        context.reports.append(each(graph, context))
    context.observe(f"{stage} after", graph)
