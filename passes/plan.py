"""Decides what is moved together, and when: ``bucket`` and ``schedule`` as the configuration says.

"auto" is tried on copies of the graphs, and so are the buckets of "module", both with all that the later passes do and
in the same memory: a budget of the user's, or what FSDP2's eager order takes in the buckets of "module". The one that
keeps to it, and then the one that is faster in the simulation, is done. So where both fit, "auto" is never slower in
the model of ``simulate`` than the buckets of "module" are in that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph

from .bucket import bucket
from .bucket_load import Free
from .context import PassConfig, PassContext, Report
from .dedup import dedup
from .fuse_copies import fuse_copies
from .machine import cost_model
from .memory import live_bytes
from .schedule import eager_peak, schedule
from .simulate import simulate
from .torch_compat import copy_to_try


def decide(graphs: Sequence[Graph], config: PassConfig) -> tuple[PassConfig, int | None]:
    """What ``merge`` and ``order`` go by: choices in which "auto" is settled, and the budget where they have none.

    Args:
        graphs: in the order in which they run, after ``accumulate``; they stay as they are.
        config: the user's choices.

    Raises:
        ValueError: the hardware profile of the configuration cannot be read any more.
    """
    is_settled = config.memory_budget is not None or not config.schedule
    if config.bucket == "module" or (config.bucket != "auto" and is_settled):
        return config, None
    eager = _eager_peak(graphs, config)
    if config.bucket != "auto":
        return config, eager
    config = replace(config, memory_budget=eager if config.memory_budget is None else config.memory_budget)
    return min(config, replace(config, bucket="module"), key=lambda choice: _cost(graphs, choice)), None


def merge(graphs: Sequence[Graph], config: PassConfig) -> list[Report]:
    """Run ``bucket`` on each graph; "auto" has the room that they leave of the budget."""
    context = PassContext(config)
    return [bucket(graph, context, free) for graph, free in zip(graphs, _free(graphs, config), strict=True)]


def order(graphs: Sequence[Graph], config: PassConfig, default_budget: int | None = None) -> list[Report]:
    """Run ``schedule``."""
    return schedule(graphs, PassContext(config), default_budget)


def _eager_peak(graphs: Sequence[Graph], config: PassConfig) -> int:
    tried = [copy_to_try(graph) for graph in graphs]
    merge(tried, replace(config, bucket="module"))
    return eager_peak(tried)


def _free(graphs: Sequence[Graph], config: PassConfig) -> list[Free | None]:
    """What the graphs leave of the budget as they are, where buckets depend on it."""
    budget = config.memory_budget
    if config.bucket != "auto":
        return [None] * len(graphs)
    assert budget is not None, "``decide`` has set one"
    live = iter(live_bytes(graphs))
    return [{node: budget - next(live) for node in graph.nodes} for graph in graphs]


def _cost(graphs: Sequence[Graph], config: PassConfig) -> tuple[bool, float]:
    """How long copies take in the simulation, once all is done; what takes more memory than its budget comes last."""
    tried = [copy_to_try(graph) for graph in graphs]
    merge(tried, config)
    if config.schedule:
        order(tried, config)
    for graph in tried:
        dedup(graph, PassContext(config))
        fuse_copies(graph, PassContext(config))
    assert config.memory_budget is not None
    return max(live_bytes(tried)) > config.memory_budget, simulate(tried, cost_model(tried, config.hardware)).seconds
