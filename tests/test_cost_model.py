"""Times of nodes: closed forms, chains counted once, one trace for many sizes, a large model against 6 N T."""

from __future__ import annotations

import gc
import operator
import random
import re
import time
from dataclasses import replace
from functools import cache

import pytest
import sympy
import torch
from fake_world import fake_world, graphs_of
from graph_maker import WORLD, GraphMaker, aten
from llama_graphs import config_of, llama_graphs
from models import shard
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry
from traced import SmallNet

from fsdp_compile import fully_shard
from fsdp_compile.models import LlamaConfig
from fsdp_compile.passes import CostModel, HardwareProfile, Network, Placement, copy_graph, profile, world_symbol
from fsdp_compile.passes.torch_compat import RESIZE, emit

FLOPS, BYTES, LAUNCH, HOST = 1e12, 1e9, 1e-5, 1e7  # rates, and the time of a launch
ALPHA, LINK = 1e-3, 1e8
MACHINE = HardwareProfile(
    "machine",
    peak_flops=(("bfloat16", 4 * FLOPS), ("float32", FLOPS)),
    memory_bandwidth=BYTES,
    kernel_launch=LAUNCH,
    host_bandwidth=HOST,
    ranks_in_node=8,
    within=Network(ALPHA, LINK),
    across=Network(10 * ALPHA, LINK / 10),
)
SMALL = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab=512)  # 32 divides all, so no padding
close = pytest.approx


def model(**sizes: int | Placement) -> CostModel:
    return CostModel(MACHINE, {"0": WORLD, "replicas": 3} | sizes)


def total(graph: Graph, costs: CostModel) -> float:
    return sum(costs.seconds(node) for node in graph.nodes)


def traffic(graph: Graph, *nodes: Node) -> list[float]:
    """Bytes of each node through memory, by its time less that of a launch; exact for nodes without FLOPs."""
    costs = model()
    return [round((costs.seconds(node) - costs.work(node).launches * LAUNCH) * BYTES) for node in nodes]


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, FLOPS), (torch.bfloat16, 4 * FLOPS)], ids=str)
def test_a_large_product_takes_what_its_flops_take(dtype: torch.dtype, rate: float) -> None:
    maker = GraphMaker()
    a, b = maker.input(dtype, (20_000, 30_000)), maker.input(dtype, (30_000, 40_000))
    product = emit(maker.graph, aten.mm.default, a, b)
    maker.finish(product)
    assert model().seconds(product) == close(2 * 20_000 * 30_000 * 40_000 / rate + LAUNCH, rel=1e-12)
    assert model().lane(product) == "compute"


def test_a_thin_product_takes_what_its_bytes_take() -> None:
    maker = GraphMaker()
    a, b = maker.input(size=(7, 300)), maker.input(size=(300, 11))
    product = emit(maker.graph, aten.mm.default, a, b)
    maker.finish(product)
    assert model().seconds(product) == close(4 * (7 * 300 + 300 * 11 + 7 * 11) / BYTES + LAUNCH, rel=1e-12)


def test_an_operand_given_twice_is_read_once() -> None:
    maker = GraphMaker()
    a = maker.input(size=(4, 4))
    product = emit(maker.graph, aten.mm.default, a, emit(maker.graph, aten.t.default, a))
    graph = maker.finish(product)
    assert traffic(graph, product) == [4 * 2 * 16]


def test_a_chain_reads_and_writes_once_and_is_launched_once() -> None:
    maker = GraphMaker()
    x, y = maker.input(), maker.input()  # 48 bytes each
    a = maker.add(x, y)
    b = maker.add(a, x)
    c = maker.add(b, y)
    graph = maker.finish(c)
    assert traffic(graph, a, b, c) == [96, 0, 48]
    assert total(graph, model()) == close((2 * 48 + 48) / BYTES + LAUNCH, rel=1e-12)


def test_what_leaves_a_chain_in_the_middle_is_written() -> None:
    maker = GraphMaker()
    a = maker.double(maker.input())
    b = maker.double(a)
    half = emit(maker.graph, aten.slice.Tensor, a, 0, 0, 2)
    graph = maker.finish(b, half)
    assert traffic(graph, a, b) == [96, 48]


def test_a_kernel_behind_a_barrier_reads_again() -> None:
    maker = GraphMaker()
    x = maker.input(size=(4, 4))
    a = maker.double(x)
    product = emit(maker.graph, aten.mm.default, a, a)
    b = maker.add(a, product)
    graph = maker.finish(b)
    assert traffic(graph, a, product, b) == [2 * 64, 2 * 64, 3 * 64]
    assert total(graph, model()) == close(7 * 64 / BYTES + 3 * LAUNCH, rel=1e-12)


def test_parts_and_broadcasts_are_read_as_far_as_they_are_there() -> None:
    maker = GraphMaker()
    x, row = maker.input(size=(8, 6)), maker.input(size=(1, 6))
    split = emit(maker.graph, aten.split.Tensor, x, 4)
    part = emit(maker.graph, operator.getitem, split, 1)
    wide = emit(maker.graph, aten.expand.default, row, [4, 6])
    tall = emit(maker.graph, aten.t.default, emit(maker.graph, aten.t.default, wide))
    a = maker.add(part, tall)
    graph = maker.finish(a)
    assert traffic(graph, a) == [4 * (24 + 6 + 24)]


def test_a_table_is_read_as_far_as_it_is_looked_up() -> None:
    maker = GraphMaker()
    table, tokens = maker.input(size=(1000, 4)), maker.input(torch.int64, (5,))
    rows = emit(maker.graph, aten.embedding.default, table, tokens)
    graph = maker.finish(rows)
    assert traffic(graph, rows) == [5 * 8 + 2 * 5 * 4 * 4]


def test_a_reduction_writes_little() -> None:
    maker = GraphMaker()
    x = maker.input(size=(4, 3))
    mean = emit(maker.graph, aten.mean.dim, x, [1])
    graph = maker.finish(mean)
    assert traffic(graph, mean) == [48 + 16]


def test_a_copy_into_something_writes_it_and_does_not_read_it() -> None:
    maker = GraphMaker()
    x, place = maker.input(), maker.input()
    copy = emit(maker.graph, aten.copy_.default, place, x)
    foreach = maker.graph.call_function(aten._foreach_copy_.default, ([place, copy], [x, x]))
    graph = maker.finish()
    assert traffic(graph, copy, foreach) == [2 * 48, 3 * 48]


def test_a_reshape_costs_if_it_copies() -> None:
    maker = GraphMaker()
    x = maker.input()
    view = emit(maker.graph, aten.reshape.default, x, [3, 4])
    copy = emit(maker.graph, aten.reshape.default, emit(maker.graph, aten.t.default, x), [-1])
    graph = maker.finish(view, copy)
    assert model().seconds(view) == 0 and traffic(graph, copy) == [96]


def test_what_is_free() -> None:
    maker = GraphMaker()
    x = maker.input()
    whole = maker.gather(x, "a")
    view = emit(maker.graph, aten.t.default, whole)
    pair = emit(maker.graph, aten.max.dim, view, 0)
    first = emit(maker.graph, operator.getitem, pair, 0)
    room = maker.graph.call_function(aten.empty.memory_format, ([4, 3],))
    with maker.mode:
        room.meta["val"] = torch.empty(4, 3)
    size = maker.graph.call_function(operator.mul, (3, 4))
    size.meta["val"] = 12
    free = maker.graph.call_function(RESIZE, (whole, 0))
    graph = maker.finish(first)
    costs = model()
    for node in (x, whole, view, first, room, size, free, *graph.find_nodes(op="output")):
        assert (costs.seconds(node), costs.expression(node), costs.lane(node)) == (0, 0, None), node
    assert costs.seconds(pair) > 0 and costs.seconds(whole.args[0]) > 0


def test_copies_to_the_host_go_over_its_link() -> None:
    maker = GraphMaker()
    x = maker.input()
    away = maker.graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("cuda")})
    with maker.mode:
        away.meta["val"] = torch.empty(4, 3, device="cuda")
    maker.finish(away)
    assert model().seconds(away) == close(48 / HOST + LAUNCH, rel=1e-12)
    assert model().lane(away) == "compute"


def test_attention_on_cpu_counts_like_attention() -> None:
    maker = GraphMaker()
    q, k, v = (maker.input(size=(2, heads, 512, 64)) for heads in (8, 2, 2))
    on_cpu = emit(maker.graph, aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    maker.finish(emit(maker.graph, operator.getitem, on_cpu, 0))
    shapes = [source.meta["val"].shape for source in (q, k, v)]
    assert model().work(on_cpu).flops == 2 * 2 * (2 * 8 * 512 * 512 * 64)
    assert model().work(on_cpu).flops == flop_registry[aten._scaled_dot_product_flash_attention](*shapes)


def test_formulas_that_are_registered_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = GraphMaker()
    double = maker.double(maker.input())
    maker.finish(double)
    monkeypatch.setitem(flop_registry, double.target.overloadpacket, lambda *args, **kwargs: 12345)
    assert model().work(double).flops == 12345


def test_grouped_products_count_like_products_of_all_rows() -> None:
    """torch's flop counter does not know them: rows of one group each, and, for gradients of weights, columns."""
    maker = GraphMaker()
    sizes = (48, 16), (4, 16, 32), (16, 48)
    rows, weights, columns = (maker.input(torch.bfloat16, size) for size in sizes)
    ends = maker.input(torch.int32, (4,))
    products = [emit(maker.graph, aten._grouped_mm.default, *pair, ends) for pair in ((rows, weights), (columns, rows))]
    maker.finish(*products)
    assert [each.meta["val"].shape for each in products] == [(48, 32), (4, 16, 16)]
    assert [model().work(each).flops for each in products] == [2 * 48 * 16 * 32, 2 * 16 * 48 * 16]


# -- collectives ------------------------------------------------------------------------------------------------------


def test_collectives_take_what_their_closed_forms_say() -> None:
    maker = GraphMaker()
    x = maker.input(size=(4, 3))  # 48 bytes
    gather = maker.gather(x, "a").args[0]
    scattered = maker.reduce(x, "a")
    scatter, all_reduce = scattered.args[0], maker.all_reduce(scattered, "a").args[0]
    maker.finish()
    costs = model(replicas=Placement(3, in_node=1))
    assert costs.seconds(gather) == close(ALPHA + 48 / LINK, rel=1e-12)  # half of 96 bytes
    assert costs.seconds(scatter) == close(ALPHA + 24 / LINK, rel=1e-12)
    assert costs.seconds(all_reduce) == close(2 * (2 * 10 * ALPHA + 2 / 3 * 24 / (LINK / 10)), rel=1e-12)
    assert [costs.lane(node) for node in (gather, scatter, all_reduce)] == ["group 0", "group 0", "group replicas"]


def test_a_coalesced_gather_pays_its_latency_once() -> None:
    maker = GraphMaker()
    c10d = torch.ops._c10d_functional
    inputs = [maker.input(), maker.input(torch.bfloat16)]
    start = emit(maker.graph, c10d.all_gather_into_tensor_coalesced.default, inputs, WORLD, "0")
    maker.finish(emit(maker.graph, c10d.wait_tensor.default, emit(maker.graph, operator.getitem, start, 0)))
    assert model().seconds(start) == close(ALPHA + (48 + 24) / LINK, rel=1e-12)


def test_collectives_that_are_in_no_graph() -> None:
    costs = model(**{"0": 8})
    assert costs.collective_seconds("all_gather", 800, "0") == close(7 * ALPHA + 700 / LINK)
    assert costs.collective_seconds("reduce_scatter", 100, "0") == close(7 * ALPHA + 700 / LINK)
    assert costs.collective_seconds("all_reduce", 800, "0") == close(14 * ALPHA + 1400 / LINK)
    line = costs.line("all_gather", "0")
    assert line.seconds(800) == costs.collective_seconds("all_gather", 800, "0")


def test_a_group_may_have_links_of_its_own() -> None:
    costs = model(**{"0": Placement(4, network=Network(2 * ALPHA, LINK / 2))})
    assert costs.collective_seconds("all_gather", 800, "0") == close(2 * (3 * ALPHA + 600 / LINK))
    assert costs.collective_seconds("all_gather", 900, "replicas") == close(2 * ALPHA + 600 / LINK)


def test_unknown_groups_and_kinds() -> None:
    maker = GraphMaker()
    whole = maker.gather(maker.input(), "a", name="7")
    maker.finish(whole)
    complaint = "unknown process group '7'; the cost model was given '0', 'replicas'"
    with pytest.raises(ValueError, match=complaint):
        model().seconds(whole.args[0])
    with pytest.raises(ValueError, match=complaint):
        model().collective_seconds("all_gather", 1, "7")
    with pytest.raises(ValueError, match=complaint):
        model().at({"7": 2})
    with pytest.raises(ValueError, match="unknown kind of collective 'gossip'; known are all_gather, reduce_scatter"):
        model().collective_seconds("gossip", 1, "0")
    assert model().lane(whole.args[0]) == "group 7"


# -- one trace, many sizes --------------------------------------------------------------------------------------------


@cache
def small_llama(world: int) -> tuple[Graph, Graph]:
    return llama_graphs(SMALL, world, tokens=16)


@pytest.mark.parametrize("part", [0, 1], ids=["forward", "backward"])
def test_a_trace_of_one_size_serves_another(part: int) -> None:
    """Node for node what a trace of the other size says: shards are smaller there, all else is the same."""
    traced, other = small_llama(2)[part], small_llama(32)[part]
    rescaled, direct = CostModel(MACHINE, {"0": 2}).at({"0": 32}), CostModel(MACHINE, {"0": 32})
    expected = {node.name: direct.seconds(node) for node in other.nodes}
    assert {node.name: rescaled.seconds(node) for node in traced.nodes} == close(expected, rel=1e-9)
    as_traced = CostModel(MACHINE, {"0": 2})
    assert total(traced, as_traced) != close(total(traced, rescaled), rel=0.05)


@pytest.mark.parametrize("part", [0, 1], ids=["forward", "backward"])
def test_expressions_and_numbers_agree(part: int) -> None:
    graph, costs = small_llama(2)[part], CostModel(MACHINE, {"0": 2})
    expressions = {node: costs.expression(node) for node in graph.nodes}
    world = world_symbol("0")
    assert {symbol for each in expressions.values() for symbol in each.free_symbols} == {world}
    for size in (1, 2, 8, 64, 512):
        numbers = costs.at({"0": size})
        for node, expression in expressions.items():
            assert float(expression.subs(world, size)) == close(numbers.seconds(node), rel=1e-9), node


def test_shards_are_scaled_and_nothing_else() -> None:
    maker = GraphMaker()
    x = maker.input()
    shard = emit(maker.graph, torch.ops.prims.convert_element_type.default, x, torch.bfloat16)
    whole = maker.gather(shard, "a")
    shard.meta["custom"] = whole.meta["custom"]  # the same transition made both
    used = maker.double(whole)
    scattered = maker.reduce(used, "a")
    reduced = maker.all_reduce(scattered, "a")
    added = maker.double(reduced)
    again = maker.double(maker.gather(added, "b"))
    maker.finish(again)
    small = model()
    large = small.at({"0": 8 * WORLD})

    def moved(costs: CostModel, node: Node) -> float:
        return costs.seconds(node) - LAUNCH

    for node in (shard, added):
        assert moved(large, node) == close(moved(small, node) / 8, rel=1e-9)
    for node in (used, again):
        assert large.seconds(node) == small.seconds(node)
    fixed = small.line("all_reduce", "replicas").fixed
    both = [costs.seconds(reduced.args[0]) - fixed for costs in (small, large)]
    assert both[1] == close(both[0] / 8, rel=1e-9)


def test_a_symbol_for_a_size() -> None:
    maker = GraphMaker()
    start = maker.gather(maker.input(), "a").args[0]
    maker.finish()
    shards = sympy.Symbol("shards", integer=True, positive=True)
    costs = model(**{"0": Placement(shards)})
    assert costs.expression(start).free_symbols == {shards}
    complaint = "the time of all_gather_into_tensor_default depends on shards: say with at() what that is"
    with pytest.raises(ValueError, match=re.escape(complaint)):
        costs.seconds(start)
    with pytest.raises(ValueError, match="the time of all_gather depends on shards"):
        costs.collective_seconds("all_gather", 1, "0")
    assert costs.at({"0": 4}).seconds(start) == model(**{"0": 4}).seconds(start)


def dynamic_graphs(rows: int) -> dict[str, Graph]:
    x = torch.zeros(rows, 5, 16)
    torch._dynamo.mark_dynamic(x, 0)
    return dict(graphs_of(shard(SmallNet(16), fully_shard), x))


def test_dynamic_dimensions() -> None:
    """A symbol in the expressions; in numbers the traced size, or any other."""
    with fake_world(2):
        ten = dynamic_graphs(10)
    with fake_world(2):
        forty = dynamic_graphs(40)
    for stage in ("forward after", "backward after"):
        costs = CostModel(MACHINE, {"0": 2})
        names = {str(symbol) for node in ten[stage].nodes for symbol in costs.expression(node).free_symbols} - {"W_0"}
        (name,) = names
        expected = {node.name: costs.seconds(node) for node in forty[stage].nodes}
        assert {node.name: costs.seconds(node) for node in ten[stage].nodes} != close(expected, rel=0.05)
        resized = costs.at({}, {name: 40})
        assert {node.name: resized.seconds(node) for node in ten[stage].nodes} == close(expected, rel=1e-9)
        (symbol,) = {s for node in ten[stage].nodes for s in costs.expression(node).free_symbols if s.name == name}
        for node in ten[stage].nodes:
            value = costs.expression(node).subs({symbol: 40, world_symbol("0"): 2})
            assert float(value) == close(resized.seconds(node), rel=1e-9)


def test_asking_about_a_dynamic_graph_binds_it_to_nothing() -> None:
    with fake_world(2):
        graph = dynamic_graphs(10)["backward after"]
    (shape_env,) = {
        size.node.shape_env
        for node in graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    }
    before = len(shape_env.guards), dict(shape_env.replacements)
    total(graph, CostModel(MACHINE, {"0": 2}))
    assert (len(shape_env.guards), dict(shape_env.replacements)) == before


# -- graphs that change -----------------------------------------------------------------------------------------------


def test_new_and_missing_nodes_are_seen() -> None:
    maker = GraphMaker()
    a = maker.double(maker.input(size=(4, 4)))
    graph = maker.finish(maker.double(a))
    costs = model()
    assert total(graph, costs) == close(128 / BYTES + LAUNCH)
    with graph.inserting_before(graph.find_nodes(op="output")[0]):
        product = emit(graph, aten.mm.default, a, a)
    assert costs.seconds(product) == close(128 / BYTES + LAUNCH)
    assert total(graph, costs) == close((192 + 128) / BYTES + 2 * LAUNCH)
    graph.erase_node(product)
    assert total(graph, costs) == close(128 / BYTES + LAUNCH)


def test_graphs_are_not_kept_alive() -> None:
    costs = model()
    maker = GraphMaker()
    total(maker.finish(maker.double(maker.input())), costs)
    del maker
    gc.collect()
    assert len(costs._graphs) == 0


def test_equal_graphs_take_equal_times_and_order_does_not_matter() -> None:
    graph = small_llama(2)[1]
    costs = CostModel(MACHINE, {"0": 2})
    copied = copy_graph(graph)
    assert [costs.seconds(node) for node in copied.nodes] == [costs.seconds(node) for node in graph.nodes]
    before = list(copied.nodes)
    reorder(copied, random.Random(0))
    assert before != list(copied.nodes)
    assert total(copied, CostModel(MACHINE, {"0": 2})) == close(total(graph, costs), rel=1e-9)


def reorder(graph: Graph, rng: random.Random) -> None:
    """Another order in which all comes before its uses."""
    (output,) = graph.find_nodes(op="output")
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes if node is not output}
    ready = [node for node, sources in waiting.items() if sources == 0]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        output.prepend(node)
        for user in node.users:
            if user is not output:
                waiting[user] -= 1
                ready += [user] * (waiting[user] == 0)
    graph.lint()


def test_digest() -> None:
    base = model()
    others = [
        base.at({"0": 4}),
        base.at({}, {"s0": 3}),
        model(replicas=Placement(3, in_node=1)),
        CostModel(replace(MACHINE, kernel_launch=2 * LAUNCH), base.groups),
    ]
    assert len({each.digest() for each in (base, *others)}) == 5
    assert base.digest() == model().digest()


# -- large models -----------------------------------------------------------------------------------------------------


def check_against_6nt(layers: int, tokens: int = 8192) -> None:
    """FLOPs are 6 N T, with N all weights but the embedding's, and 14 T² d a layer of attention; so is time.

    The counter takes all of T² though attention is causal: 4 T² d forward, and 10 T² d backward, as that computes the
    scores once more. Large products take what these FLOPs take, and a launch each; all else adds less than a quarter.
    """
    config = config_of("llama3-8b", layers)
    graphs, costs = llama_graphs(config, 64, tokens), CostModel(profile("h100"), {"0": 64})
    weights = 2 * config.dim * config.head_dim * (config.heads + config.kv_heads) + 3 * config.dim * config.ffn_dim
    dense = 6 * (layers * weights + config.vocab * config.dim) * tokens
    attention = 14 * tokens**2 * config.dim * layers
    compute = [node for graph in graphs for node in graph.nodes if costs.lane(node) == "compute"]
    heavy = [node for node in compute if costs.work(node).flops]
    assert sum(costs.work(node).flops for node in heavy) == dense + attention
    expected = (dense + attention) / (989.4e12 * 0.803) + 0.9e-6 * len(heavy)
    assert sum(costs.seconds(node) for node in heavy) == close(expected, rel=1e-9)
    assert expected < sum(costs.seconds(node) for node in compute) < 1.25 * expected


def test_two_layers_of_llama_8b() -> None:
    check_against_6nt(layers=2)


@pytest.mark.slow
def test_llama_8b() -> None:
    check_against_6nt(layers=32)


def test_a_large_graph_is_costed_in_two_seconds() -> None:
    """As many nodes as forward and backward of 126 layers of Llama have; processor time."""
    graph = repeated(small_llama(2)[1], nodes=60_000)
    costs = CostModel(MACHINE, {"0": 2})
    start = time.process_time()
    seconds = total(graph, costs)
    assert time.process_time() - start < 2 and seconds > 0
    assert len(graph.nodes) > 60_000


def repeated(graph: Graph, nodes: int) -> Graph:
    """The same graph again and again, side by side."""
    large = Graph()
    outputs: list[Node] = []
    while len(large.nodes) < nodes:
        copied = large.graph_copy(graph, {})
        outputs += [each for each in copied if isinstance(each, Node)]  # type: ignore[union-attr]
    large.output(tuple(outputs))
    return large
