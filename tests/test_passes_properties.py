"""On random trees of modules, run on simulated ranks: the passes keep what graphs compute, bit for bit, and their form.

``hypothesis`` draws the trees; it is derandomized, so that every run tests the same ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_world import Stages, fake_world, graphs_of, text_of, unscheduled
from hypothesis import HealthCheck, Phase, given, note, settings
from random_models import Tree, trees
from simulated_ranks import flat, random_inputs, run_on_all_ranks, same_bits
from torch.fx import Graph, Node

from fsdp_compile.passes import (
    MemoryProfile,
    PassConfig,
    PassContext,
    accumulate,
    bucket,
    copy_graph,
    dedup,
    fuse_copies,
    print_skeleton,
    regather,
    schedule,
    tag_digest,
    verified,
    verify,
)
from fsdp_compile.passes.graph_view import (
    COPIES,
    REDUCE,
    WAIT,
    Collective,
    frees,
    gathers,
    made_by,
    reductions,
    tag_of,
)
from fsdp_compile.passes.torch_compat import c10d, is_alias

aten = torch.ops.aten


def on_random_trees(examples: int) -> Callable[[Callable[[Tree], None]], Callable[[], None]]:
    """Call a test with many trees. A failing one is shown as found: shrinking it takes minutes (``Phase.shrink``)."""

    def decorate(test: Callable[[Tree], None]) -> Callable[[], None]:
        test = settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(test)
        return given(trees())(test)  # type: ignore[return-value]

    return decorate


def compile_tree(tree: Tree, rank: int = 0, grad: bool = True) -> Stages:
    note(f"tree: {tree}")
    with fake_world(tree.world, rank), unscheduled(), torch.set_grad_enabled(grad):
        return graphs_of(tree.build(), tree.example())


@on_random_trees(examples=14)
def test_training(tree: Tree) -> None:
    check_training(tree)


@pytest.mark.slow
@on_random_trees(examples=60)
def test_training_on_many_trees(tree: Tree) -> None:
    check_training(tree)


def check_training(tree: Tree) -> None:
    stages = compile_tree(tree)
    assert [stage for stage, _ in stages] == [
        *("joint before", "joint after"),
        *("forward before", "backward before", "forward after", "backward after"),
    ]
    graphs = dict(stages)
    for graph in graphs.values():
        note(print_skeleton(graph))
    check_regather(graphs["joint before"], graphs["joint after"])
    forward = check_planned(graphs["forward before"], graphs["forward after"], tree.world)
    accumulated = check_accumulate(graphs["backward before"], tree.world)
    backward = check_planned(accumulated, graphs["backward after"], tree.world)
    check_partition(graphs, tree.world)
    check_schedule([forward, backward], tree.world)


@on_random_trees(examples=8)
def test_inference(tree: Tree) -> None:
    (_, before), (_, after) = compile_tree(tree, grad=False)
    verify("all", {"inference": after})
    assert not frees(after)
    inputs = random_inputs(before, tree.world)
    assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    check_unchanged(regather, after)
    check_unchanged(bucket, after)
    regather(before, PassContext())
    check_schedule([check_planned(before, after, tree.world)], tree.world)


@on_random_trees(examples=5)
def test_graphs_do_not_know_their_rank(tree: Tree) -> None:
    """Compile caches are shared between ranks, and ranks must agree on every collective."""
    first = compile_tree(tree, rank=0)
    last = compile_tree(tree, rank=tree.world - 1)
    assert [stage for stage, _ in first] == [stage for stage, _ in last]
    for (_, left), (_, right) in zip(first, last, strict=True):
        assert text_of(left) == text_of(right)
        assert tag_digest(left.nodes) == tag_digest(right.nodes)


@on_random_trees(examples=8)
def test_buckets_across_modules(tree: Tree) -> None:
    graphs = dict(compile_tree(tree))
    accumulate(graphs["backward before"], PassContext())
    for choice in (1000, "1GB", "auto"):
        for before in (graphs["forward before"], graphs["backward before"]):
            check_buckets_across_modules(before, PassContext(PassConfig(bucket=choice)), tree.world)


# -- form -------------------------------------------------------------------------------------------------------------


def check_unchanged(each: Callable[[Graph, PassContext], Any], graph: Graph) -> None:
    """Running a pass again does nothing."""
    again = copy_graph(graph)
    assert each(again, PassContext()).changes == 0
    assert text_of(again) == text_of(graph)
    assert tag_digest(again.nodes) == tag_digest(graph.nodes)
    assert marks(again) == marks(graph)


def marks(graph: Graph) -> list[Any]:
    return [(node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in graph.nodes]


# -- meaning ----------------------------------------------------------------------------------------------------------


def check_planned(before: Graph, after: Graph, world: int) -> Graph:
    """What the unscheduled passes make of a graph; returns what it is in between, with nothing dropped yet."""
    bucketed = check_bucket(before, world)
    check_fuse_copies(check_dedup(bucketed, PassConfig(), world), world)
    fused = check_fuse_copies(check_dedup(bucketed, PassConfig(schedule=False), world), world)
    assert nameless(fused) == nameless(after)
    return bucketed


def check_bucket(before: Graph, world: int) -> Graph:
    after, again = copy_graph(before), copy_graph(before)
    with verified("bucket", {"bucketed": after}, PassConfig()):
        bucket(after, PassContext())
    for seed in range(2):
        inputs = random_inputs(before, world, seed)
        assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    check_unchanged(bucket, after)
    bucket(again, PassContext())
    assert nameless(again) == nameless(after), "the same graph gave another result"
    return after


def check_dedup(before: Graph, config: PassConfig, world: int) -> Graph:
    """Each parameter is still gathered, some once less, and what the graph computes stays."""
    after = copy_graph(before)
    report = dedup(after, PassContext(config))
    verify("dedup", {"without repeats": after})
    assert report.changes == report.before.gathers - report.after.gathers
    inputs = random_inputs(before, world)
    assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    check_unchanged(lambda graph, _: dedup(graph, PassContext(config)), after)
    return after


def check_fuse_copies(before: Graph, world: int) -> Graph:
    """At most one kernel of a transition before each collective; bits stay, and the peak is no higher."""
    after = copy_graph(before)
    with verified("fuse_copies", {"fused": after}, PassConfig()):
        fuse_copies(after, PassContext())
    for seed in range(2):
        inputs = random_inputs(before, world, seed)
        assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    check_unchanged(fuse_copies, after)
    for collective in (*gathers(after), *reductions(after)):
        assert len(kernels_before(collective)) <= 1, kernels_before(collective)
    return after


def kernels_before(collective: Collective) -> list[Node]:
    """What the transition runs for what is sent, but for padding, for making a gradient contiguous, and smaller."""
    made = [node for source in collective.inputs for node in made_by(source, collective.tag.phase)]
    return [node for node in dict.fromkeys(made) if not is_alias(node) and not prepares_one(node)]


def prepares_one(node: Node) -> bool:
    if node.target in COPIES and tag_of(node).phase == REDUCE:
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        return before.itemsize > after.itemsize or before.dtype is after.dtype
    return node.target in (aten.constant_pad_nd.default, operator.getitem)


def nameless(graph: Graph) -> str:
    """The text of a graph whatever names passes gave nodes, which depend on what else they have made."""
    copied = copy_graph(graph)
    for number, node in enumerate(copied.nodes):
        if node.op == "call_function":
            node.name = f"node_{number}"
    return text_of(copied)


def check_schedule(graphs: list[Graph], world: int) -> None:
    """The same nodes in another order, and no higher a peak than the budget or what no overlap at all needs.

    What is dropped after that raises the peak neither.
    """
    after = [copy_graph(graph) for graph in graphs]
    schedule(after, PassContext(PassConfig(memory_budget=0)))
    least = MemoryProfile.of(after).peak
    planned = [copy_graph(graph) for graph in graphs]
    schedule(planned, PassContext())
    check_peak_without_repeats(planned, PassConfig(), world)
    for budget in (least, 2 * least):
        context = PassContext(PassConfig(memory_budget=budget))
        with verified("schedule", dict(zip(("forward", "backward"), after, strict=False)), context.config):
            schedule(after, context)
        assert MemoryProfile.of(after).peak <= budget
        for old, new in zip(graphs, after, strict=True):
            assert len(old.nodes) == len(new.nodes)
            inputs = random_inputs(old, world)
            assert same_bits(run_on_all_ranks(old, inputs), run_on_all_ranks(new, inputs))
        assert all(report.changes == 0 for report in schedule(after, context))
        check_peak_without_repeats(after, context.config, world)


def check_peak_without_repeats(graphs: list[Graph], config: PassConfig, world: int) -> None:
    peak = MemoryProfile.of(graphs).peak
    assert MemoryProfile.of([check_dedup(graph, config, world) for graph in graphs]).peak <= peak


def check_buckets_across_modules(before: Graph, context: PassContext, world: int) -> None:
    after = copy_graph(before)
    with verified("bucket", {"bucketed": after}, context.config):
        bucket(after, context)
    inputs = random_inputs(before, world)
    assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    check_unchanged(lambda graph, _: bucket(graph, context), after)
    for gather in gathers(after):
        if len(gather.tag.params) > 1:
            needed = needed_by(gather.start)
            assert not [node for node in needed if "mm" in str(node.target)], "a launch waits for a matrix product"
    check_dedup(after, context.config, world)


def needed_by(node: Node) -> dict[Node, None]:
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        new = [source for source in stack.pop().all_input_nodes if source not in found]
        found |= dict.fromkeys(new)
        stack += new
    return found


def check_accumulate(before: Graph, world: int) -> Graph:
    """Each parameter is reduced once and, as rounding is another then, to nearly the same; returns the new graph."""
    after = copy_graph(before)
    with verified("accumulate", {"backward": after}, PassConfig()):
        accumulate(after, PassContext())
    inputs = random_inputs(before, world)
    left, right = (run_on_all_ranks(graph, inputs) for graph in (before, after))
    if text_of(before) == text_of(after):
        assert same_bits(left, right)
    else:  # each rank's gradient is rounded
        assert_equal_but_for_rounding(left, right, (2 + world) * coarsest_step(before))
    check_unchanged(accumulate, after)
    return after


def coarsest_step(graph: Graph) -> float:
    """The largest relative rounding step among the dtypes that the graph computes in."""
    values = (node.meta.get("val") for node in graph.nodes)
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def assert_equal_but_for_rounding(left: list[Any], right: list[Any], tolerance: float) -> None:
    """Compare with the size of an output on all ranks: where terms cancel, small ones have the rounding of large."""
    for ours, theirs in zip(zip(*map(flat, left), strict=True), zip(*map(flat, right), strict=True), strict=True):
        present = [a for a in ours if isinstance(a, torch.Tensor) and a.numel()]
        largest = max((a.nan_to_num(0, 0, 0).abs().max().item() for a in present), default=0.0)
        for a, b in zip(ours, theirs, strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest, equal_nan=True)


def check_regather(before: Graph, after: Graph) -> None:
    """It removes the frees, and nothing but these."""
    without = copy_graph(before)
    for node in frees(without):
        without.erase_node(node)
    assert text_of(without) == text_of(after)
    check_unchanged(regather, after)


def check_partition(graphs: dict[str, Graph], world: int) -> None:
    """Forward and backward after all passes compute, one after the other, what the joint graph did before any.

    All but that a parameter's gradients are added before they are reduced.
    """
    joint = copy_graph(graphs["joint before"])
    accumulate(joint, PassContext())
    inputs = random_inputs(joint, world, seed=7)
    by_name = [dict(zip(placeholders(joint), of_rank, strict=True)) for of_rank in inputs]
    saved_names = output_names(graphs["forward before"])
    forward_inputs = pick(by_name, placeholders(graphs["forward after"]))
    forward_outputs = run_on_all_ranks(graphs["forward after"], forward_inputs)
    for names, outputs in zip(by_name, forward_outputs, strict=True):
        names.update(zip(saved_names, outputs, strict=True))
    backward_outputs = run_on_all_ranks(graphs["backward after"], pick(by_name, placeholders(graphs["backward after"])))
    expected = [flat(outputs) for outputs in run_on_all_ranks(joint, inputs)]
    for rank in range(world):
        gradients = flat(backward_outputs[rank])
        results = flat(forward_outputs[rank])[: len(expected[rank]) - len(gradients)]
        assert same_bits([*results, *gradients], expected[rank]), f"rank {rank}"


def placeholders(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def output_names(graph: Graph) -> list[str]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [str(node) for node in output.args[0]]


def pick(values: list[dict[str, Any]], names: list[str]) -> list[list[Any]]:
    return [[of_rank[name] for name in names] for of_rank in values]


# -- the simulation itself --------------------------------------------------------------------------------------------


def test_the_simulation_finds_a_read_before_the_wait() -> None:
    with fake_world(size=2):
        tree = Tree(width=4, world=2, policy="as is", tokens=True, root_reshard=False)
        graph = dict(graphs_of(tree.build(), tree.example()))["forward before"]
    inputs = random_inputs(graph, 2)
    wrong = copy_graph(graph)
    (gather,) = gathers(wrong)
    (wait,) = gather.waits
    wait.replace_all_uses_with(gather.start, delete_user_cb=lambda user: user is not wait)
    assert not same_bits(run_on_all_ranks(graph, inputs), run_on_all_ranks(wrong, inputs))


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_the_simulation_reduces(kind: str) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    start = graph.call_function(c10d.reduce_scatter_tensor.default, (x, kind, 2, "0"))
    wait = graph.call_function(WAIT, (start,))
    for node in (x, start, wait):
        node.meta["val"] = None
    graph.output((wait,))
    outputs = run_on_all_ranks(graph, [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 6.0])]])
    total = torch.tensor([4.0, 8.0]) / (2 if kind == "avg" else 1)
    assert same_bits(outputs, [(total[:1],), (total[1:],)])
