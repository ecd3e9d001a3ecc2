"""What "auto" does to random graphs: never slower than the buckets of modules, in no more memory than eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from fake_world import fake_world
from random_graphs import random_pair
from torch.fx import Graph

from fsdp_compile.passes import MemoryProfile, PassConfig, PassContext, bucket, copy_graph, run_parts, simulate
from fsdp_compile.passes.cost_model import CostModel
from fsdp_compile.passes.graph_view import is_launch, process_group_of
from fsdp_compile.passes.hardware import profile
from fsdp_compile.passes.schedule import eager_order

SLACK = 1 + 1e-9  # sums of the same times in another order


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("seed", range(12))
def test_auto_is_no_slower_and_takes_no_more_memory(seed: int, hardware: str) -> None:
    pair = random_pair(seed, modules=Random(seed).randint(1, 8))
    across, of_modules, eager = ([copy_graph(graph) for graph in pair] for _ in range(3))
    run_parts(*across, PassContext(PassConfig(bucket="auto", hardware=hardware)))
    run_parts(*of_modules, PassContext(PassConfig(hardware=hardware)))
    for graph in eager:
        bucket(graph, PassContext())
    eager_order(eager)
    assert seconds(across, hardware) <= SLACK * min(seconds(of_modules, hardware), seconds(eager, hardware))
    assert MemoryProfile.of(across).peak <= MemoryProfile.of(eager).peak


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_kept(seed: int) -> None:
    """Where the eager order takes no more."""
    pair = random_pair(seed, modules=6)
    eager = [copy_graph(graph) for graph in pair]
    for graph in eager:
        bucket(graph, PassContext())
    eager_order(eager)
    for more in (1, 1.1, 10):
        budget = int(more * MemoryProfile.of(eager).peak)
        graphs = [copy_graph(graph) for graph in pair]
        run_parts(*graphs, PassContext(PassConfig(bucket="auto", hardware="h100", memory_budget=budget)))
        assert MemoryProfile.of(graphs).peak <= budget


def seconds(graphs: Sequence[Graph], hardware: str) -> float:
    groups = {process_group_of(node): 2 for graph in graphs for node in graph.nodes if is_launch(node)}
    return simulate(graphs, CostModel(profile(hardware), groups)).seconds
