"""Lower bounds: of small graphs, worked out by hand; and no plan for a random graph beats them.

The small graphs are those of ``schedules``: gathers take 3 s, reductions 2, and a letter in a drawing is a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest
import torch
from fake_world import fake_world, graphs_of
from graph_maker import GraphMaker
from plain_costs import random_costs
from random_graphs import random_pair, reorder
from random_models import Tree
from schedules import BYTES, COSTS, long_schedule, schedule
from test_passes_properties import on_random_trees
from torch.fx import Graph, Node

from fsdp_compile.passes import MemoryProfile, PassConfig, PassContext, accumulate, bounds, bucket, copy_graph, simulate
from fsdp_compile.passes.costs import CheapestCosts, KindsApart
from fsdp_compile.passes.graph_view import UNSHARD, Tag, set_tag
from fsdp_compile.passes.memory_bound import memory_bound
from fsdp_compile.passes.plan import order
from fsdp_compile.passes.time_bound import Job, earliest_end, time_bound
from fsdp_compile.passes.torch_compat import RESIZE, emit

LONGEST = 1 + 1e-9  # sums of the same times in another order


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    if "tree" in request.function.__name__:
        yield  # it makes worlds itself
        return
    with fake_world(size=2):
        yield


# -- time -------------------------------------------------------------------------------------------------------------


# lane       aaabbbccc           aaabbbccc
# compute    ...AAAABBBBCCCC     ...A..B..C
@pytest.mark.parametrize(("seconds", "bound"), [(4, 3 + 4 + 4 + 4), (3, 12), (1, 3 + 3 + 3 + 1)])
def test_forward_of_equal_modules(seconds: int, bound: float) -> None:
    """Known, and reached by launching all at once; in what order the graph happens to be does not matter."""
    apart = schedule(f"a /a A={seconds} b /b B={seconds} c /c C={seconds}")
    early = schedule(f"a b c /a A={seconds} /b B={seconds} /c C={seconds}")
    assert time_bound(apart, COSTS) == time_bound(early, COSTS) == bound == simulate([early], COSTS).seconds


# lane       aaabbbccc
# compute    ...A..BB.CCCCCCC    or another order of 1, 2 and 7 seconds
@pytest.mark.parametrize("durations", list(permutations([1, 2, 7])))
def test_forward_of_uneven_modules(durations: tuple[int, ...]) -> None:
    a, b, c = durations
    graph = schedule(f"a b c /a A={a} /b B={b} /c C={c}")
    assert time_bound(graph, COSTS) == max(3 + a + b + c, 6 + b + c, 9 + c) == simulate([graph], COSTS).seconds


# lane        CCBBAA                    CC  BB  AA
# compute    CBA             CCCCBBBBAAAA
@pytest.mark.parametrize("durations", [(1, 1, 1), (2, 2, 2), (4, 4, 4), (1, 2, 7), (7, 1, 2)])
def test_backward(durations: tuple[int, ...]) -> None:
    c, b, a = durations
    graph = schedule(f"C={c} -C B={b} -B A={a} -A /-C /-B /-A", "tangents")
    assert time_bound(graph, COSTS) == max(c + 6, c + b + 4, c + b + a + 2) == simulate([graph], COSTS).seconds


# lane       aaa                 aaa
# compute    XXXAA      not      ...AAXXX
def test_compute_that_needs_no_gather_fills_the_time() -> None:
    """Unless compute keeps its order."""
    make = GraphMaker()
    make.made_up("A=2", (8, 3), make.gather(make.input(), "a"))
    make.made_up("X=3", (8, 3), make.input())
    graph = make.finish()
    assert time_bound(graph, COSTS) == 3 + 2
    assert time_bound(graph, COSTS, in_order=True) == 3 + 2 + 3 == simulate([graph], COSTS).seconds
    assert [bounds([graph], COSTS, in_order).time_step for in_order in (False, True)] == [5, 8]


def test_compute_that_no_gradient_needs_may_come_last() -> None:
    """The last reduction need not be exposed, unless compute keeps its order."""
    make = GraphMaker()
    gradient = make.made_up("X=3", (8, 3), make.input(name="tangents_1"))
    needed = make.made_up("A=2", (8, 3), make.input(name="tangents_2"))
    graph = make.finish(gradient, make.reduce(needed, "a"))
    assert time_bound(graph, COSTS) == 2 + 3
    assert time_bound(graph, COSTS, in_order=True) == 3 + 2 + 2 == simulate([graph], COSTS).seconds


def test_latency_counts_once() -> None:
    """As all may be merged; a launch for each takes longer."""
    graph = schedule("a b c /a A=1 /b B=1 /c C=1")
    costs = replace(COSTS, latency=1)
    assert time_bound(graph, costs) == pytest.approx(1 + 9 + 1)
    assert simulate([graph], costs).seconds == 3 + 9 + 1


# lane       aaaCCAA             gathers       aaa
# compute    C..A                reductions    .CC.AA
def test_lanes() -> None:
    graph = schedule("C=1 -C a /a A=1 -A /-C /-A", "tangents")
    assert time_bound(graph, COSTS) == 3 + 2 + 2
    assert time_bound(graph, KindsApart(COSTS)) == 3 + 1 + 2


# lane       aaabbb  CCCC      twice what C computed is reduced
# compute    ......CC
def test_communication_before_and_behind() -> None:
    make = GraphMaker()
    both = [make.gather(make.input(), param) for param in "ab"]
    needs_both = make.made_up("C=2", (8, 3), *both)
    graph = make.finish(*(make.reduce(needs_both, param) for param in "ab"))
    assert time_bound(graph, COSTS) == 6 + 2 + 4


# lane       aaa    AA  BB
# compute    ...AAAABBBB
def test_compute_between_communication() -> None:
    make = GraphMaker()
    gathered = make.gather(make.input(), "a")
    made = [make.made_up(f"{name}=4", (8, 3), gathered) for name in "AB"]
    graph = make.finish(*(make.reduce(each, "a") for each in made))
    assert time_bound(graph, COSTS) == 3 + 8 + 2


# lane               AAAAAA....BBBBBB......      of 20 s each, not drawn to scale
# compute    AAAAAAAABBBBBBBB
def test_all_that_a_reduction_needs_comes_before() -> None:
    """One after the other, although nothing else asks for an order."""
    make = GraphMaker()
    made = [make.made_up(f"{name}=4", (4, 3), make.input()) for name in "ABCD"]
    graph = make.finish(*(make.reduce(make.stack(*pair), "a") for pair in (made[:2], made[2:])))
    free_stack = replace(COSTS, compute=lambda node: 4 if node in made else 0, rates=(("reduce_scatter", BYTES / 20),))
    assert time_bound(graph, free_stack) == 8 + 40


# lanes      aaa  oooppp
# compute    ...AA...BBBBCCCC
def test_a_path_over_lanes() -> None:
    make = GraphMaker()
    first = make.made_up("A=2", (4, 3), make.gather(make.input(), "a"))
    of_others = [make.gather(first, param, name="another group") for param in "op"]
    for wait in of_others:
        wait.all_input_nodes[0].meta.pop("custom")
    made = [make.made_up(f"{name}=4", (8, 3), wait) for name, wait in zip("BC", of_others, strict=True)]
    assert time_bound(make.finish(*made), COSTS) == 3 + 2 + 3 + 8


@pytest.mark.parametrize(("dtype", "counted"), [(torch.float64, 5), (torch.float32, 0)])
def test_copies_around_collectives_count_if_they_cast(dtype: torch.dtype, counted: int) -> None:
    """A pass may do without the others."""
    make = GraphMaker()
    copy = make.cast(make.input(dtype), torch.float32, "a")
    graph = make.finish(make.made_up("A=2", (8, 3), make.gather(copy, "a")))
    costs = replace(COSTS, compute=lambda node: 5 if node is copy else 2)
    assert time_bound(graph, costs) == counted + 3 + 2
    assert simulate([graph], costs).seconds == 5 + 3 + 2


def test_casts_for_what_is_kept_unsharded_do_not_count() -> None:
    make = GraphMaker()
    forward = make.finish(
        make.made_up("A=1", (8, 3), gathered_after_cast(make)), *make.graph.find_nodes(op="placeholder")
    )
    make = GraphMaker()
    made = make.made_up("C=1", (8, 3), make.input(name="tangents_1"))
    backward = make.finish(make.made_up("A=1", (8, 3), gathered_after_cast(make), made))
    costs = replace(COSTS, compute=lambda node: 1)
    assert [time_bound(graph, costs) for graph in (forward, backward)] == [1 + 3 + 1] * 2
    assert bounds([forward, backward], costs).time_any_reshard == (1 + 3 + 1) + (1 + 1)


def gathered_after_cast(make: GraphMaker) -> Node:
    cast = make.cast(make.input(torch.float64), torch.float32, "a")
    set_tag(cast, Tag(0, "", ("a",), (0,), UNSHARD))
    return make.gather(cast, "a")


def test_collectives_of_others_are_not_merged() -> None:
    make = GraphMaker()
    waits = [make.gather(make.input(), "a") for _ in range(3)]
    for wait in waits:
        wait.all_input_nodes[0].meta.pop("custom")
    graph = make.finish(*waits)
    assert time_bound(graph, replace(COSTS, latency=1)) == 3 * (1 + 3)


def test_steps() -> None:
    forward = schedule("a /a A=1", saves=True)
    backward = schedule("C=1 a /a A=1 -A /-A", "tangents")
    least = bounds([forward, backward], COSTS)
    assert (least.time_forward, least.time_backward, least.time_step) == (4, 6, 10)
    assert least.time_any_reshard == 4 + (1 + 1 + 2)  # a is there from the forward
    assert bounds([backward], COSTS).time_any_reshard == 6
    assert bounds([forward], COSTS).time_backward == 0


@pytest.mark.parametrize("seed", range(30))
def test_the_rule_finds_the_worst_set(seed: int) -> None:
    """Of all sets of jobs, the largest of least head + all durations + least tail."""
    chance = Random(seed)
    jobs: list[Job] = [(chance.randint(0, 9), chance.randint(1, 5), chance.randint(0, 9)) for _ in range(7)]
    sets = [each for size in range(1, 8) for each in combinations(jobs, size)]
    worst = max(min(r for r, _, _ in each) + sum(d for _, d, _ in each) + min(q for *_, q in each) for each in sets)
    assert earliest_end(jobs) == worst


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_of_a_forward() -> None:
    """At B: the batch and three half shards; A; what is gathered for B; B. Reached where nothing is gathered early."""
    apart, early = schedule("a /a A=1 b /b B=1 c /c C=1"), schedule("a b c /a A=1 /b B=1 /c C=1")
    held = 1 + 3 / 2
    assert memory_bound([apart]) == memory_bound([early]) == (held + 3) * BYTES == MemoryProfile.of([apart]).peak
    assert MemoryProfile.of([early]).peak == (held + 3 + 1) * BYTES


def test_memory_of_a_pair() -> None:
    """What is saved before a node stays, and what is read after it is there already."""
    forward, backward = GraphMaker(), GraphMaker()
    a = forward.made_up("A", (8, 3), forward.input(size=(8, 3)))
    b = forward.made_up("B", (8, 3), a)
    c = forward.made_up("C", (8, 3), b)
    d = forward.made_up("D", (8, 3), c)
    sa, sb, sc, tangent = (backward.input(size=(8, 3), name=name) for name in ("A", "B", "C", "tangents_1"))
    e = backward.made_up("E", (8, 3), tangent, sc)
    f = backward.made_up("F", (8, 3), e, sb)
    g = backward.made_up("G", (8, 3), f, sa)
    graphs = forward.finish(d, a, b, c), backward.finish(g)
    # At E: the caller's x and D; A, B, C; the gradient of D; E.
    assert memory_bound(graphs) == 7 * BYTES == MemoryProfile.of(graphs).peak
    assert memory_bound(graphs[:1]) == 5 * BYTES == MemoryProfile.of(graphs[:1]).peak


def test_only_what_is_read_counts_of_what_transitions_make() -> None:
    """Other plans do without padding, casts and packed copies."""
    make = GraphMaker()
    wait = make.gather(make.cast(make.input(torch.float64), torch.float32, "a"), "a")
    rows = emit(make.graph, torch.ops.aten.slice.Tensor, wait, 0, 0, 5)
    graph = make.finish(make.made_up("A", (8, 3), rows))
    shard, padding = 4 * 3 * 8, 3 * 3 * 4
    assert memory_bound([graph]) == shard + 5 * 3 * 4 + BYTES
    assert MemoryProfile.of([graph]).peak == shard + 5 * 3 * 4 + padding + BYTES


def test_copies_that_transitions_make_do_not_count() -> None:
    make = GraphMaker()
    decoded = make.cast(make.gather(make.input(), "a"), torch.float64, "a")
    row = emit(make.graph, torch.ops.aten.slice.Tensor, decoded, 0, 0, 1)
    graph = make.finish(make.made_up("A", (1, 3), row))
    assert memory_bound([graph]) == (1 / 2 + 1) * BYTES  # the gather


def test_two_views_of_a_parameter_are_one() -> None:
    make = GraphMaker()
    rows = emit(make.graph, torch.ops.aten.slice.Tensor, make.gather(make.input(), "a"), 0, 0, 5)
    graph = make.finish(make.made_up("A", (8, 3), rows, emit(make.graph, torch.ops.aten.t.default, rows)))
    assert memory_bound([graph]) == 4 * 3 * 4 + 5 * 3 * 4 + BYTES


def test_parts_of_what_was_reduced_are_several() -> None:
    make = GraphMaker()
    reduced = [make.reduce(make.input(name=f"tangents_{param}", size=(8, 3)), param) for param in "ab"]
    graph = make.finish(*reduced, make.made_up("B", (16, 3), reduced[0]))
    bucket(graph, PassContext())
    assert memory_bound([graph]) == (1 / 2 + 1 / 2 + 2) * BYTES


def test_what_is_returned_twice_is_one() -> None:
    make = GraphMaker()
    reduced = make.reduce(make.input(name="tangents_1", size=(8, 3)), "a")
    made = make.made_up("B", (16, 3), reduced)
    graph = make.finish(reduced, emit(make.graph, torch.ops.aten.view.default, reduced, [12]), made)
    assert memory_bound([graph]) == (1 / 2 + 2) * BYTES


def test_all_that_is_saved_is_there_at_the_start() -> None:
    make = GraphMaker()
    saved = [make.input(size=(8, 3), name=name) for name in ("saved_1", "saved_2", "tangents_1")]
    graph = make.finish(*(make.made_up("A", (1, 3), each) for each in saved))
    assert memory_bound([graph]) == 3 * BYTES


def test_of_a_collective_the_larger_side_counts() -> None:
    """Its output may lie in its input, also where it is what the graph returns."""
    make = GraphMaker()
    graph = make.finish(make.reduce(make.cast(make.input(torch.bfloat16, (8, 3)), torch.float32, "a"), "a"))
    gradient = 8 * 3 * 2
    assert memory_bound([graph]) == gradient + BYTES
    assert MemoryProfile.of([graph]).peak == gradient + BYTES + BYTES / 2


def test_what_is_freed_counts_only_before() -> None:
    make = GraphMaker()
    wait = make.gather(make.input(), "a")
    made = make.made_up("A", (8, 3), wait)
    make.graph.call_function(RESIZE, (wait, 0))
    graph = make.finish(make.made_up("B", (2, 3), made, wait), wait)
    assert memory_bound([graph]) == (1 / 2 + 1 + 1) * BYTES  # at A: the shard, what was gathered, A
    (free,) = graph.find_nodes(op="call_function", target=RESIZE)
    graph.erase_node(free)
    assert memory_bound([graph]) == (1 / 2 + 1 + 1 + 1 / 4) * BYTES  # at B, too


def test_what_is_away_for_a_while_does_not_count() -> None:
    make = GraphMaker()
    away, other = make.input(size=(8, 3)), make.input(size=(8, 3))
    make.graph.call_function(RESIZE, (away, 0))
    small = make.made_up("B", (1, 3), make.made_up("A", (16, 3), other))
    make.graph.call_function(RESIZE, (away, BYTES))
    graph = make.finish(small)
    assert memory_bound([graph]) == (1 + 2 + 1 / 8) * BYTES == MemoryProfile.of([graph]).peak


# -- random plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_beats_them(seed: int) -> None:
    """In any order, merged or not; those that keep the order of compute do not beat the larger bounds either."""
    chance = Random(seed)
    pair = random_pair(seed, modules=chance.randint(1, 7))
    for _ in range(3):
        costs = random_costs(seed, chance)
        for compute_stays in (False, True):
            check_plans(pair, costs, chance, compute_stays)


@on_random_trees(examples=7)
def test_no_plan_beats_them_on_random_trees(tree: Tree) -> None:
    with fake_world(tree.world):
        stages = dict(graphs_of(tree.build(), tree.example()))
        before = stages["forward before"], stages["backward before"]
        accumulate(before[1], PassContext())
        chance = Random(0)
        for compute_stays in (False, True):
            check_plans(before, random_costs(0, chance), chance, compute_stays)
        # Without ``fuse_copies``: random costs know nothing of what its kernels have in common with those they replace.
        forward, backward = (copy_graph(graph) for graph in before)
        for graph in (forward, backward):
            bucket(graph, PassContext())
        order([forward, backward], PassConfig())
        check_plan(before, (forward, backward), random_costs(0, chance), compute_stays=True)


Pair = tuple[Graph, Graph]


def check_plans(pair: Pair, costs: CheapestCosts, chance: Random, compute_stays: bool) -> None:
    for merge in (False, True):
        forward, backward = (copy_graph(graph) for graph in pair)
        for graph in (forward, backward):
            if merge:
                bucket(graph, PassContext())
            reorder(graph, chance, compute_stays)
        check_plan(pair, (forward, backward), costs, compute_stays)


def check_plan(pair: Pair, plan: Pair, costs: CheapestCosts, compute_stays: bool) -> None:
    timeline, peak = simulate(plan, costs), MemoryProfile.of(plan).peak
    for graphs in (pair, plan):  # a plan's own bounds hold for it too
        least = bounds(graphs, costs, compute_stays)
        forward, backward = timeline.phases
        assert forward.seconds * LONGEST >= least.time_forward
        assert backward.seconds * LONGEST >= least.time_backward
        assert timeline.seconds * LONGEST >= least.time_any_reshard
        assert peak >= least.memory


# -- cost of computing them -------------------------------------------------------------------------------------------


def test_growth() -> None:
    """Six times the modules take about six times as long; that they do not take 36 times is easy to tell."""
    few, many = (seconds_for(long_schedule(modules, compute=12)) for modules in (40, 240))
    assert many < 6**1.5 * few


def seconds_for(graph: Graph) -> float:
    def once() -> float:
        start = time.process_time()
        simulate([graph], COSTS)
        bounds([graph], COSTS)
        MemoryProfile.of([graph])
        return time.process_time() - start

    return min(once() for _ in range(4))
