"""The pass pipeline, in order.

On the joint graph of forward and backward, before the compiler partitions it:

1. ``regather``: what is freed after forward is gathered again in the backward.

On the forward graph and on the backward graph, after partitioning:

2. ``bucket``: one gather and one reduction for each group and run of its module.

A pass changes a graph in place, leaves it lint-clean and in topological order, does nothing when run again, and reads
tags only (``graph_view``): it serves any graph whose nodes are tagged so, whoever traced it. Nothing in here imports
the runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from torch.fx import Graph

from .bucket import bucket
from .regather import regather
from .skeleton import print_skeleton

__all__ = ["bucket", "observers", "print_skeleton", "regather", "run_joint", "run_partitioned", "source_hash"]

Observer = Callable[[str, Graph], None]

observers: list[Observer] = []  # called with a stage's name and its graph, before and after the passes on it


def run_joint(graph: Graph) -> None:
    """Run the passes on a joint graph, or on an inference graph that has no backward."""
    _observe("joint before", graph)
    regather(graph)
    _observe("joint after", graph)


def run_partitioned(graph: Graph, name: str = "partitioned") -> None:
    """Run the passes on a forward or on a backward graph."""
    _observe(f"{name} before", graph)
    bucket(graph)
    _observe(f"{name} after", graph)


def source_hash() -> bytes:
    """Hash of the source of all passes, for the keys of compile caches: another source means another result."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _observe(stage: str, graph: Graph) -> None:
    for observer in list(observers):
        observer(stage, graph)
