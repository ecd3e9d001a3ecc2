"""Where ``schedule`` puts launches and waits: worked out by hand for small graphs, and what holds for random ones.

Schedules are written as in ``schedules``: "a" launches a gather, "/a" waits for it, "A=1" computes with it, "-A" and
"/-A" launch and wait for the reduction of what A computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from fake_world import fake_world
from graph_maker import GraphMaker
from plain_costs import drawn, random_costs
from random_graphs import random_pair, reorder
from schedules import BYTES, long_schedule, schedule
from torch.fx import Graph, Node

from fsdp_compile.passes import MemoryProfile, PassConfig, PassContext, copy_graph, simulate
from fsdp_compile.passes import schedule as schedule_pass
from fsdp_compile.passes.graph_view import WAIT, is_launch, kind_of, launch_of, tag_of
from fsdp_compile.passes.schedule import eager_order

PLENTY = 1 << 40
SHARD = BYTES // 2


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


def run(*graphs: Graph, budget: int | None = None) -> int:
    """Run the pass; how many nodes moved."""
    return sum(each.changes for each in schedule_pass(graphs, PassContext(PassConfig(memory_budget=budget))))


def written(graph: Graph) -> str:
    """The order of a graph, as ``schedules`` writes it."""
    words = []
    for node in graph.nodes:
        start = launch_of(node) if node.target is WAIT else node
        if start is not None and is_launch(start):
            letter = tag_of(start).name
            word = letter if kind_of(start) == "all_gather" else f"-{letter.upper()}"
            words.append(f"/{word}" if node.target is WAIT else word)
        elif node.op == "call_function":
            words.append(node.name.replace("_", "="))
    return " ".join(words)


def scheduled(text: str, budget: int | None = None, name: str = "batch") -> str:
    graph = schedule(text, name)
    run(graph, budget=budget)
    return written(graph)


def test_all_memory_of_the_world() -> None:
    assert scheduled("a /a A=1 b /b B=1 c /c C=1", PLENTY) == "a b c /a A=1 /b B=1 /c C=1"


def test_no_memory_to_spare() -> None:
    text = "a /a A=1 b /b B=1 c /c C=1"
    assert scheduled(text, 0) == text


def test_the_peak_of_the_eager_order_by_default() -> None:
    """At the first there is room for one more, because nothing has been computed yet."""
    text = "a /a A=1 b /b B=1 c /c C=1 d /d D=1"
    assert scheduled(text) == "a b c /a A=1 /b B=1 d /c C=1 /d D=1"


def test_waits_stand_before_what_reads() -> None:
    """Not where they were traced; and gathers are launched in the order of their use."""
    assert scheduled("b /b a /a A=1 B=1", PLENTY) == "a b /a A=1 /b B=1"


def test_reductions_run_on() -> None:
    text = "C=1 -C /-C B=1 -B /-B A=1 -A /-A"
    assert scheduled(text, PLENTY, "tangents") == "C=1 -C B=1 -B A=1 -A /-C /-B /-A"
    assert scheduled(text, 0, "tangents") == text


def test_a_reduction_is_waited_for_when_its_gradient_takes_up_too_much() -> None:
    """Until then it is in use."""
    text = "C=1 -C /-C B=1 -B /-B A=1 -A /-A"
    peak = MemoryProfile.of([schedule(text, "tangents")]).peak
    assert scheduled(text, peak + BYTES, "tangents") == "C=1 -C B=1 -B /-C A=1 -A /-B /-A"


def test_gathers_overtake_no_reduction_that_is_waited_for_sooner() -> None:
    """There is room for b's launch before D's reduction, but that is waited for before b: it would take longer."""
    text = "d /d D=1 -D /-D c /c C=1 -C /-C b /b B=1 -B /-B a /a A=1 -A /-A"
    peak = MemoryProfile.of([schedule(text, "tangents")]).peak
    found = scheduled(text, peak + BYTES, "tangents")
    assert found == "d c /d D=1 -D b a /c C=1 -C /-D /b B=1 -B /a A=1 -A /-C /-B /-A"


def test_the_eager_order() -> None:
    graph = schedule("c /c C=1 -C /-C b /b B=1 -B /-B a /a A=1 -A /-A", "tangents")
    eager_order([graph])
    assert written(graph) == "c b /c C=1 -C a /b B=1 -B /-C /a A=1 -A /-B /-A"


def test_launches_wait_for_reductions_that_hold_memory() -> None:
    text = "c /c C=1 -C /-C b /b B=1 -B /-B a /a A=1 -A /-A"
    peak = MemoryProfile.of([schedule(text, "tangents")]).peak
    for extra in (0, BYTES, 2 * BYTES, 3 * BYTES):
        graph = schedule(text, "tangents")
        run(graph, budget=peak + extra)
        assert MemoryProfile.of([graph]).peak <= peak + extra


def test_forward_and_backward_share_the_budget() -> None:
    """Where the backward needs more, there is room in the forward."""
    forward, backward = schedule("a /a A=1 b /b B=1 c /c C=1", saves=True), long_schedule(modules=3, compute=2)
    run(forward, backward)
    alone = schedule("a /a A=1 b /b B=1 c /c C=1", saves=True)
    run(alone)
    assert MemoryProfile.of([forward, backward]).peak >= MemoryProfile.of([alone]).peak
    five = " ".join(f"{letter} /{letter} {letter.upper()}=1" for letter in "abcde")
    forward, alone = (schedule(five, saves=True) for _ in range(2))
    run(forward, long_schedule(modules=5, compute=2))
    run(alone)
    assert written(forward) == "a b c d e /a A=1 /b B=1 /c C=1 /d D=1 /e E=1" != written(alone)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int) -> None:
    chance = Random(seed)
    pair = random_pair(seed, modules=chance.randint(1, 12))
    costs = random_costs(seed, chance)
    if chance.random() < 0.5:
        for graph in pair:
            reorder(graph, chance, compute_stays=True)
    compute = [_compute(graph) for graph in pair]
    run(*pair, budget=0)
    least, slowest = MemoryProfile.of(pair).peak, simulate(pair, costs).seconds
    for budget in (least, int(1.2 * least), 2 * least, PLENTY):
        run(*pair, budget=budget)
        assert [_compute(graph) for graph in pair] == compute
        assert MemoryProfile.of(pair).peak <= budget
        assert simulate(pair, costs).seconds <= slowest * (1 + 1e-9)
        assert run(*pair, budget=budget) == 0


@pytest.mark.parametrize("seed", range(60))
def test_random_against_the_eager_order(seed: int) -> None:
    chance = Random(seed)
    modules = chance.randint(1, 12)
    pair, eager = random_pair(seed, modules), random_pair(seed, modules)
    costs = random_costs(seed, chance)
    run(*pair)
    eager_order(eager)
    assert MemoryProfile.of(pair).peak <= MemoryProfile.of(eager).peak
    assert simulate(pair, costs).seconds <= simulate(eager, costs).seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_other_sizes_launch_in_the_same_order(seed: int) -> None:
    """By default; only parameters are of the same size on all ranks."""
    chance = Random(seed)
    pair = random_pair(seed, modules=chance.randint(3, 12))
    orders = []
    for longest in (1, 100):
        rank = [copy_graph(graph) for graph in pair]
        for node in (node for graph in rank for node in graph.nodes if "compute" in node.name):
            rows = 1 + int(longest * drawn(seed, node))
            node.meta["val"] = node.meta["val"].new_empty(rows, 3)
        run(*rank)
        orders.append([[node.name for node in graph.nodes if is_launch(node)] for graph in rank])
    assert orders[0] == orders[1]


def test_a_default_budget_takes_nothing_away() -> None:
    """Giving up overlap where it is too small would depend on what memory a rank's activations take."""
    text = "a /a A=1 b /b B=1 c /c C=1 d /d D=1"
    graph = schedule(text)
    schedule_pass([graph], PassContext(), 0)
    assert written(graph) == scheduled(text)


SIZES = pytest.mark.parametrize("rows", [(1, 1), (1, 100), (100, 1), (100, 100)])


def launched(graph: Graph) -> list[str]:
    return [f"{kind_of(node)} {tag_of(node).params[0]}" for node in graph.nodes if is_launch(node)]


def begin_with_an_all_reduce(make: GraphMaker) -> tuple[list[Node], Node, Node]:
    """The shards of three modules; of the first the gradient of its input, and of its parameter, reduced twice."""
    shards = [make.input(size=(4, 3), name=f"primals_{index}") for index in range(3)]
    last = make.made_up("first", (8, 3), make.input(size=(8, 3), name="tangents_1"), make.gather(shards[0], "a", 0))
    return shards, last, make.all_reduce(make.reduce(last, "a", 0), "a", 0)


@SIZES
def test_an_all_reduce_keeps_its_place_before_gathers_of_frozen_modules(rows: tuple[int, int]) -> None:
    """No reduction comes after it that would hold it there, and what memory there is may not move it."""
    make = GraphMaker()
    shards, last, reduced = begin_with_an_all_reduce(make)
    for index, size in zip((1, 2), rows, strict=True):
        last = make.made_up(f"before_{index}", (size, 3), last)
        last = make.made_up(f"after_{index}", (8, 3), last, make.gather(shards[index], "abc"[index], index))
        last = make.double(make.double(last))
    graph = make.finish(reduced, last)
    run(graph)
    assert launched(graph) == ["all_gather a", "all_gather b", "reduce_scatter a", "all_reduce a", "all_gather c"]


@SIZES
def test_no_gather_overtakes_an_all_reduce_whose_result_is_read(rows: tuple[int, int]) -> None:
    """That is launched before the next reduction is; the gather could be launched between its two reductions."""
    make = GraphMaker()
    shards, last, reduced = begin_with_an_all_reduce(make)
    last = make.made_up("between", (rows[0], 3), last)
    read = make.made_up("reads", (4, 3), reduced)
    last = make.made_up("after_1", (8, 3), make.double(last), make.gather(shards[1], "b", 1))
    again = make.reduce(make.made_up("before_2", (rows[1] * 8, 3), last), "b", 1)
    graph = make.finish(read, again, make.made_up("after_2", (8, 3), last, make.gather(shards[2], "c", 2)))
    run(graph)
    assert launched(graph)[2:] == ["reduce_scatter a", "all_reduce a", "all_gather c", "reduce_scatter b"]


def _compute(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function" and tag_of(node) is None]


def test_time_is_linear() -> None:
    """Not of the clock: moves between positions are counted in slices of an array."""
    graph = long_schedule(modules=200, compute=40)
    assert run(graph, budget=PLENTY) > 0
