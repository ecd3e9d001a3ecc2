"""The pass pipelines, in order.

On the joint graph of forward and backward, before the compiler partitions it:

1. ``regather``: what is freed after forward is gathered again in the backward, but for what ``keep_unsharded`` chooses.

On the forward and the backward graph together, after partitioning:

2. ``keep_slices``: where fewer ranks keep a slice, it is saved for the backward, which gathers among them.

On the backward graph:

3. ``accumulate``: one reduction for each parameter, however often its module ran.

On the forward graph, the backward graph, and a graph that has no backward:

4. ``bucket``: one gather for each group and run of its module, one reduction for each group; or across groups, as
   ``bucket_choice`` says: by size, or the fastest that ``bucket_timeline`` finds with the plans of ``bucket_plan``, by
   what ``bucket_load`` reads and the costs of a ``machine``.
5. ``schedule``: gathers launched early, reductions waited for late; on forward and backward together, as they share the
   memory.
6. ``dedup``: one gather for runs of a module that follow each other, instead of one for each run.
7. ``fuse_copies``: one kernel for the casts, divisions and copies on each side of a collective, by ``operators``.
8. ``for_gloo``: on gloo, which may not have several of the usual gathers under way, other collectives.
9. ``announce``: one operator that says what the graph is about to launch, to profilers and to the other ranks.

Buckets and schedule go by what ``plan`` decides: where that is the cost model's, it tries both on copies first.

A pass is a function ``(graph, context) -> report``; ``keep_slices`` and ``schedule`` take several graphs. It changes
graphs in place, leaves them lint-clean and in topological order, does nothing when run again, and reads tags only
(``graph_view``): it serves any graph whose nodes are tagged so, whoever traced it. Nothing in here imports the runtime.

Around the passes: ``context`` (what they are told and report), ``stages`` (runs them, measures), ``records`` (logs,
traces and dumps what they do), ``graph_view`` (what they read), ``skeleton`` (prints a graph's communication for
people), ``summary`` (says of graphs what is moved and when), ``torch_compat`` (private torch APIs), ``verify`` (rules
that every pass keeps: of the form of graphs, ``verify_form``; of memory, ``verify_storages``; of what is moved,
``verify_traffic``; who breaks one is named in a ``fault``).

How good their result is: ``simulate`` (when everything happens, on ``costs``), ``memory`` (what is live, on
``storages``), ``bounds`` (what no plan can beat: ``time_bound`` and ``memory_bound``, on ``reach``), ``result`` (all of
it side by side), ``summary`` (what is moved, when, and why it is exposed, without the graphs).

How long a graph takes: ``hardware`` (what a machine can do) with ``alpha_beta`` (collectives) and ``profile_files``;
``work`` (what each node has to do) with ``data_flow`` and ``fusion``; ``cost_model`` puts the two together.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph

from .accumulate import accumulate
from .announce import announce, listen
from .bounds import Bounds, bounds
from .bucket import bucket
from .context import Effect, Observer, Parts, PassConfig, PassContext, Report, Traffic, source_digest
from .cost_model import CostModel, Placement, world_symbol
from .costs import KindsApart
from .dedup import dedup
from .fault import InvalidGraph
from .fuse_copies import fuse_copies
from .gloo import for_gloo
from .graph_view import REDUCE, RESHARD, UNSHARD, gathers_repeat, has_backward, tag_digest
from .hardware import HardwareProfile, Network, profile
from .keep_slices import keep_slices
from .memory import MemoryProfile
from .operators import GATHER, teach_inductor
from .plan import decide, merge, order
from .records import record_step, show
from .regather import regather
from .result import Result, evaluate, milliseconds, readable_size
from .schedule import schedule
from .simulate import Timeline, simulate
from .skeleton import print_skeleton
from .stages import run_stage
from .summary import Summary, merged, summarize
from .torch_compat import RESIZE, copy_graph, copy_node, is_alias
from .verify import verified, verify, verify_ranks

__all__ = [
    "GATHER",
    "REDUCE",
    "RESHARD",
    "RESIZE",
    "UNSHARD",
    "Bounds",
    "KindsApart",
    "MemoryProfile",
    "CostModel",
    "Effect",
    "HardwareProfile",
    "InvalidGraph",
    "Network",
    "Observer",
    "PassConfig",
    "PassContext",
    "Placement",
    "Report",
    "Result",
    "Summary",
    "Timeline",
    "Traffic",
    "accumulate",
    "announce",
    "bounds",
    "bucket",
    "copy_graph",
    "copy_node",
    "dedup",
    "evaluate",
    "for_gloo",
    "fuse_copies",
    "gathers_repeat",
    "has_backward",
    "is_alias",
    "keep_slices",
    "listen",
    "merged",
    "milliseconds",
    "print_skeleton",
    "profile",
    "readable_size",
    "regather",
    "run_inference",
    "run_joint",
    "run_parts",
    "schedule",
    "simulate",
    "source_digest",
    "summarize",
    "tag_digest",
    "teach_inductor",
    "verified",
    "verify",
    "verify_ranks",
    "world_symbol",
]


def run_joint(graph: Graph, context: PassContext) -> None:
    """Run the passes on a joint graph of forward and backward."""
    parts = {"joint": graph}
    show("before", parts, context)
    run_stage("regather", parts, context, lambda: [regather(graph, context)])
    show("after", parts, context)


def run_parts(forward: Graph, backward: Graph, context: PassContext) -> None:
    """Run the passes on the two graphs partitioned from a joint graph."""
    parts = {"forward": forward, "backward": backward}
    show("before", parts, context)
    if context.config.verify:
        verify("partitioning", parts)
    run_stage("keep_slices", parts, context, lambda: [keep_slices(forward, backward, context)])
    run_stage("accumulate", parts, context, lambda: [accumulate(backward, context)])
    _plan(parts, context)


def run_inference(graph: Graph, context: PassContext) -> None:
    """Run the passes on a graph that has no backward."""
    parts = {"inference": graph}
    show("before", parts, context)
    run_stage("regather", parts, context, lambda: [regather(graph, context)])
    _plan(parts, context)


def _plan(parts: Parts, context: PassContext) -> None:
    """Run the passes that decide what is moved together, when, and with which copies."""
    graphs = [*parts.values()]
    config, budget = decide(graphs, context.config)
    context = replace(context, config=config)
    first = run_stage("bucket", parts, context, lambda: merge(graphs, config))
    if config.schedule:
        run_stage("schedule", parts, context, lambda: order(graphs, config, budget), budget)
    run_stage("dedup", parts, context, lambda: [dedup(graph, context) for graph in graphs])
    run_stage("fuse_copies", parts, context, lambda: [fuse_copies(graph, context) for graph in graphs])
    show("after", parts, context)
    run_stage("for_gloo", parts, context, lambda: [for_gloo(graph, context) for graph in graphs])
    last = run_stage("announce", parts, context, lambda: [announce(graph, context) for graph in graphs])
    record_step(parts, first, last, config.bucket)
