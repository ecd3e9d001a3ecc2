"""What "auto" does to random graphs: never slower than the buckets of modules, in no more memory than eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from fake_world import fake_world
from random_graphs import gather_again, random_pair
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


def eager_plan(pair: Sequence[Graph]) -> list[Graph]:
    """Copies in buckets of modules and in FSDP2's eager order."""
    graphs = [copy_graph(graph) for graph in pair]
    for graph in graphs:
        bucket(graph, PassContext())
    eager_order(graphs)
    return graphs


def planned(pair: Sequence[Graph], config: PassConfig) -> list[Graph]:
    graphs = [copy_graph(graph) for graph in pair]
    run_parts(*graphs, PassContext(config))
    return graphs


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("seed", range(12))
def test_auto_is_no_slower_and_takes_no_more_memory(seed: int, hardware: str) -> None:
    pair = random_pair(seed, modules=Random(seed).randint(1, 8))
    across = planned(pair, PassConfig(bucket="auto", hardware=hardware))
    of_modules, eager = planned(pair, PassConfig(hardware=hardware)), eager_plan(pair)
    assert seconds(across, hardware) <= SLACK * min(seconds(of_modules, hardware), seconds(eager, hardware))
    assert MemoryProfile.of(across).peak <= MemoryProfile.of(eager).peak


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_kept(seed: int) -> None:
    """Where the eager order takes no more."""
    pair = random_pair(seed, modules=6)
    for more in (1, 1.1, 10):
        budget = int(more * MemoryProfile.of(eager_plan(pair)).peak)
        graphs = planned(pair, PassConfig(bucket="auto", hardware="h100", memory_budget=budget))
        assert MemoryProfile.of(graphs).peak <= budget


@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduled", "unscheduled"])
@pytest.mark.parametrize("seed", range(12))
def test_auto_where_modules_run_twice(seed: int, scheduled: bool) -> None:
    """It is compared with the buckets of modules in the same memory, in the same order, with all that comes later."""
    pair = random_pair(seed, modules=6)
    for graph in pair:
        gather_again(graph, Random(seed))
    budget = MemoryProfile.of(eager_plan(pair)).peak
    auto, module = (
        planned(pair, PassConfig(bucket=choice, hardware="h100", schedule=scheduled, memory_budget=budget))
        for choice in ("auto", "module")
    )
    assert seconds(auto, "h100") <= SLACK * seconds(module, "h100")
    assert max(MemoryProfile.of(auto).peak, MemoryProfile.of(module).peak) <= budget


def seconds(graphs: Sequence[Graph], hardware: str) -> float:
    groups = {process_group_of(node): 2 for graph in graphs for node in graph.nodes if is_launch(node)}
    return simulate(graphs, CostModel(profile(hardware), groups)).seconds
