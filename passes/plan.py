"""Decides what is moved together, and when: ``bucket`` and ``schedule`` as the configuration says.

"auto" is tried on copies of the graphs, and so are the buckets of "module": both within the memory that FSDP2's eager
order takes in the buckets of "module", or a budget of the user's. The one that is faster in the simulation is done. So
"auto" is never slower than "module" in the model of ``simulate``, and takes no more memory than the eager order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph

from .bucket import bucket
from .bucket_load import Free
from .context import PassConfig, PassContext, Report
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
    if config.bucket == "module":
        return config, None
    of_modules = [copy_to_try(graph) for graph in graphs]
    merge(of_modules, replace(config, bucket="module"))
    eager = eager_peak(of_modules)
    if config.bucket != "auto":
        return config, eager
    config = replace(config, memory_budget=eager if config.memory_budget is None else config.memory_budget)
    across = [copy_to_try(graph) for graph in graphs]
    merge(across, config)
    for tried in (across, of_modules):
        order(tried, config)
    slower = _cost(of_modules, config) < _cost(across, config)
    return (replace(config, bucket="module") if slower else config), None


def merge(graphs: Sequence[Graph], config: PassConfig) -> list[Report]:
    """Run ``bucket`` on each graph; "auto" has the room that they leave of the budget."""
    context = PassContext(config)
    return [bucket(graph, context, free) for graph, free in zip(graphs, _free(graphs, config), strict=True)]


def order(graphs: Sequence[Graph], config: PassConfig, default_budget: int | None = None) -> list[Report]:
    """Run ``schedule``, if it is to run."""
    return schedule(graphs, PassContext(config), default_budget) if config.schedule else []


def _free(graphs: Sequence[Graph], config: PassConfig) -> list[Free | None]:
    """What the graphs leave of the budget as they are, where buckets depend on it."""
    budget = config.memory_budget
    if config.bucket != "auto" or budget is None:
        return [None] * len(graphs)
    live = iter(live_bytes(graphs))
    return [{node: budget - next(live) for node in graph.nodes} for graph in graphs]


def _cost(graphs: Sequence[Graph], config: PassConfig) -> tuple[bool, float]:
    """How long they take in the simulation; what takes more memory than its budget comes last."""
    costs = cost_model(graphs, config.hardware)
    assert config.memory_budget is not None
    return max(live_bytes(graphs)) > config.memory_budget, simulate(graphs, costs).seconds
