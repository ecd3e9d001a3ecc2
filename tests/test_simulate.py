"""When everything happens: small schedules worked out by hand, drawn above each test, and what holds for random ones.

In the drawings each letter is a second: gathers (a, b) take 3, reductions (-A, drawn as A) 2; a dot is a stream that
stands still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from fake_world import fake_world
from graph_maker import GraphMaker, aten
from plain_costs import PlainCosts, drawn, random_costs
from random_graphs import random_pair, reorder
from schedules import BYTES, COSTS, schedule
from snapshots import assert_snapshot

from fsdp_compile.passes import PassContext, Timeline, bounds, bucket, copy_graph, evaluate, simulate
from fsdp_compile.passes.costs import COMPUTE, Costs, KindsApart
from fsdp_compile.passes.graph_view import WAIT

APART = KindsApart(COSTS)


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


def simulated(*texts: str, costs: Costs = COSTS, group: str = "0") -> Timeline:
    names = ("batch", "tangents")
    return simulate([schedule(text, name, group) for text, name in zip(texts, names, strict=False)], costs)


def exposed(timeline: Timeline) -> list[tuple[str, float, str]]:
    return [(each.title, each.exposed, each.reason) for each in timeline.transfers]


# lane       aaa  bbb
# compute    ...AA...BB
def test_waited_for_at_once() -> None:
    timeline = simulated("a /a A=2 b /b B=2")
    assert timeline.seconds == 10
    assert exposed(timeline) == [
        ("all_gather [a]", 3, "first of the forward"),
        ("all_gather [b]", 3, "waited for at once"),
    ]


# lane       aaabbb
# compute    ...AAAABB
def test_hidden() -> None:
    timeline = simulated("a b /a A=4 /b B=2")
    assert timeline.seconds == 9
    assert exposed(timeline) == [("all_gather [a]", 3, "first of the forward"), ("all_gather [b]", 0, "")]
    assert timeline.compute_seconds == 6
    assert timeline.lane_seconds == {"0": 6}
    assert timeline.exposed_seconds == 3


# lane       aaabbb
# compute    ...A..BB
def test_behind_another() -> None:
    timeline = simulated("a b /a A=1 /b B=2")
    assert timeline.seconds == 8
    assert exposed(timeline)[1] == ("all_gather [b]", 2, "lane busy with all_gather [a]")


# lane       aaabbb
# compute    ACC...B
def test_mostly_behind_another() -> None:
    timeline = simulated("a A=1 b C=2 /b B=1")
    assert timeline.seconds == 7
    assert exposed(timeline)[1] == ("all_gather [b]", 3, "lane busy with all_gather [a]")


# lane       aaa  bbb
# compute    ...AACC.BB
def test_launched_late() -> None:
    timeline = simulated("a /a A=2 b C=2 /b B=2")
    assert timeline.seconds == 10
    assert exposed(timeline)[1] == ("all_gather [b]", 1, "launched only after A_2")


# lane       aaabbb
# compute    AA....B
def test_the_reason_is_what_explains_most() -> None:
    """Its lane was busy for one second when b was launched, but b would have been late anyway."""
    timeline = simulated("a A=2 b /b B=1")
    assert timeline.seconds == 7
    assert exposed(timeline) == [("all_gather [a]", 0, ""), ("all_gather [b]", 4, "waited for at once")]


# lane       aaabbb
# compute    ......BBAA
def test_a_wait_is_for_all_before_on_the_lane() -> None:
    timeline = simulated("a b /b B=2 /a A=2")
    assert timeline.seconds == 10
    assert [each.exposed for each in timeline.transfers] == [0, 6]


#            forward backward
# lane       aaa    CCaaa  AA
# compute    ...AACC.....AA..
def test_backward() -> None:
    timeline = simulated("a /a A=2", "C=2 -C a /a A=2 -A /-C /-A")
    forward, backward = timeline.phases
    assert (forward.name, forward.begin, forward.end, forward.compute) == ("forward", 0, 5, 2)
    # C 5-7, its reduction 7-9, the gather 9-12, A 12-14, its reduction 14-16
    assert (backward.name, backward.begin, backward.end, backward.compute) == ("backward", 5, 16, 4)
    assert exposed(timeline)[1:] == [
        ("reduce_scatter [c]", 0, ""),
        ("all_gather [a]", 5, "waited for at once"),
        ("reduce_scatter [a]", 2, "last of the backward"),
    ]


# gathers         aaa
# reductions      CC   AA
# compute       CC...AA..
@pytest.mark.parametrize(("costs", "group"), [(APART, "0"), (COSTS, "1")], ids=["lanes by kind", "two process groups"])
def test_two_lanes(costs: Costs, group: str) -> None:
    timeline = simulated("C=2 -C a /a A=2 -A /-C /-A", costs=costs, group=group)
    assert timeline.seconds == 9
    assert sorted(timeline.lane_seconds.values()) == [3, 4]


# lane        aaabbb        C is the forward, the rest the backward
# compute    C......B
def test_no_compute_before_or_after() -> None:
    backward = simulated("C=1", "a /a b /b B=1")
    assert exposed(backward) == [
        ("all_gather [a]", 3, "first of the backward"),
        ("all_gather [b]", 3, "first of the backward"),
    ]


def test_what_nobody_waits_for_ends_within_its_graph() -> None:
    timeline = simulated("a A=1", "C=1")
    assert [phase.end for phase in timeline.phases] == [3, 4]
    assert timeline.transfers[0].waited is None


def test_a_wait_for_something_of_an_earlier_graph() -> None:
    make = GraphMaker()
    graph = make.finish(make.graph.call_function(WAIT, (make.input(),)))
    assert simulate([graph], COSTS).seconds == 0


def test_a_bucket_is_waited_for_once() -> None:
    make = GraphMaker()
    graph = make.finish(*(make.gather(make.input(size=(4, 3)), param) for param in "ab"))
    bucket(graph, PassContext())
    (transfer,) = simulate([graph], COSTS).transfers
    assert transfer.exposed == transfer.seconds == 2 * 3
    assert transfer.waited == 0
    assert transfer.bytes == 2 * BYTES
    assert transfer.tag is not None and transfer.tag.params == ("a", "b")


def test_events() -> None:
    events = simulated("a /a A=2 b B=1 /b C=0").events()
    assert [(each.name, each.lane, each.group, each.params, each.bytes, each.begin, each.end) for each in events] == [
        ("A_2", COMPUTE, "", (), 0, 3, 5),
        ("B_1", COMPUTE, "", (), 0, 5, 6),
        ("all_gather [a]", "0", "a", ("a.weight",), BYTES, 0, 3),
        ("all_gather [b]", "0", "b", ("b.weight",), BYTES, 5, 8),
    ]


# -- the table --------------------------------------------------------------------------------------------------------


TEXTS = ("a /a A=2 b /b B=2", "b /b B=2 -B a /a A=2 -A /-B /-A")


def test_the_table() -> None:
    forward, backward = TEXTS
    graphs = [schedule(forward, saves=True), schedule(backward, "tangents")]
    assert_snapshot("result", str(evaluate(graphs, in_milliseconds())))


def in_milliseconds() -> PlainCosts:
    return replace(
        COSTS,
        compute=lambda node: COSTS.compute(node) / 1e3,
        rates=tuple((kind, rate * 1e3) for kind, rate in COSTS.rates),
    )


def test_the_table_of_one_graph_without_communication() -> None:
    text = str(evaluate([schedule("A=2")], COSTS))
    assert "step" not in text and "2000.000 ms" in text and "+0.0%" in text


def test_bounds_may_be_of_other_graphs() -> None:
    apart, early = schedule("a /a A=2 b /b B=2"), schedule("a b /a A=2 /b B=2")
    least = bounds([apart], COSTS)
    assert evaluate([early], COSTS, least).bounds is least


def test_live_bytes_over_time() -> None:
    result = evaluate([schedule("a /a A=2")], COSTS)
    shard, batch, whole, made = BYTES / 2, BYTES, BYTES, BYTES
    assert result.live_over_time == [
        (0, batch + shard),  # batch
        (0, batch + shard),  # shard
        (0, batch + shard + whole),  # launch
        (0, batch + shard + whole),  # wait
        (3, batch + shard + whole + made),  # A
        (5, batch + shard + made),  # output
    ]


# -- random graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_streams_are_consistent(seed: int) -> None:
    chance = Random(seed)
    graphs = [copy_graph(graph) for graph in random_pair(seed, modules=chance.randint(1, 6))]
    for graph in graphs:
        reorder(graph, chance)
    costs = random_costs(seed, chance)
    timeline = simulate(graphs, costs)
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + timeline.exposed_seconds)
    assert all(end >= begin for begin, end in zip(timeline.begins, timeline.ends, strict=True))
    assert all(end <= begin for end, begin in zip(timeline.ends, timeline.begins[1:], strict=False))
    begins, ends = (dict(zip(timeline.nodes, times, strict=True)) for times in (timeline.begins, timeline.ends))
    on_lane: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in timeline.transfers:
        assert each.begin >= each.launched == ends[each.start]
        assert each.waited is not None and each.waited >= each.launched
        assert bool(each.reason) == (each.exposed > 0)
        on_lane[each.lane].append((each.begin, each.end))
    for times in on_lane.values():
        assert all(end <= begin for (_, end), (begin, _) in zip(times, times[1:], strict=False))
    for node in timeline.nodes:
        for source in node.all_input_nodes:
            assert begins[node] >= ends[source]


@pytest.mark.parametrize("seed", range(10))
def test_an_earlier_launch_never_hurts(seed: int) -> None:
    """If the order of launches stays: streams are first in, first out."""
    chance = Random(seed)
    graph, _ = random_pair(seed, modules=6)
    costs = PlainCosts(
        lambda node: 10 * drawn(seed, node) * ("compute" in node.name),  # casts move with the launches that need them
        rates=(("all_gather", chance.choice([10, 100, 1000])),),
    )
    before = simulate([graph], costs)
    (first, *_) = graph.find_nodes(op="call_function", target=aten.cat.default)
    for transfer in before.transfers:
        for node in (*transfer.start.all_input_nodes, transfer.start):
            if node.op == "call_function" and not node < first:
                first.prepend(node)
    graph.lint()
    assert simulate([graph], costs).seconds <= before.seconds + 1e-9
