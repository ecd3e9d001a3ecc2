"""Which collectives may become one, in small graphs made by hand."""

from __future__ import annotations

import torch
from fsdp_compile.passes import PassContext, bucket
from fsdp_compile.passes.graph_view import WAIT, Tag, gathers, reductions, set_tag
from fsdp_compile.passes.torch_compat import c10d, emit
from simulated_ranks import random_inputs, run_on_all_ranks, same_bits
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

WORLD = 2
aten = torch.ops.aten


class Maker:
    """Builds a graph of tagged collectives; a parameter is a letter, its place in the alphabet its index."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, dtype: torch.dtype = torch.float32) -> Node:
        """A placeholder of size (4, 3), before all else."""
        count = len(self.graph.find_nodes(op="placeholder"))
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first) if first else self.graph.inserting_after():
            node = self.graph.placeholder(f"x{count}")
        with self.mode:
            node.meta["val"] = torch.empty(4, 3, dtype=dtype)
        return node

    def gather(self, source: Node, param: str, group: int = 0, name: str = "0") -> Node:
        start = emit(self.graph, c10d.all_gather_into_tensor.default, source, WORLD, name)
        return self._wait(start, Tag(group, "", (param,), (ord(param) - ord("a"),), "unshard"))

    def reduce(self, source: Node, param: str, group: int = 0, kind: str = "avg", name: str = "0") -> Node:
        start = emit(self.graph, c10d.reduce_scatter_tensor.default, source, kind, WORLD, name)
        return self._wait(start, Tag(group, "", (param,), (ord(param) - ord("a"),), "reduce"))

    def _wait(self, start: Node, tag: Tag) -> Node:
        wait = emit(self.graph, WAIT, start)
        set_tag(start, tag)
        set_tag(wait, tag)
        return wait

    def double(self, source: Node) -> Node:
        return emit(self.graph, aten.add.Tensor, source, source)

    def stack(self, *sources: Node) -> Node:
        """Of ``WORLD`` shards, something of the size of the whole."""
        return emit(self.graph, aten.cat.default, list(sources))

    def bucketed(self, *outputs: Node) -> list[str]:
        """Run the pass, check that results are the same, and return the parameters of each launch in order."""
        self.graph.output(outputs)
        graph = GraphModule(torch.nn.Module(), self.graph).graph
        inputs = random_inputs(graph, WORLD)
        before = run_on_all_ranks(graph, inputs)
        bucket(graph, PassContext())
        assert same_bits(before, run_on_all_ranks(graph, inputs))
        assert bucket(graph, PassContext()).changes == 0
        launches = {found.start: found for found in (*gathers(graph), *reductions(graph))}
        return ["".join(launches[node].tag.params) for node in graph.nodes if node in launches]


def test_members_are_in_the_order_of_their_group() -> None:
    make = Maker()
    x, y, z = make.input(), make.input(), make.input()
    assert make.bucketed(make.reduce(x, "c"), make.reduce(y, "a"), make.reduce(z, "b")) == ["abc"]


def test_groups_stay_apart() -> None:
    make = Maker()
    x = make.input()
    results = [make.gather(x, param, group) for param in "ab" for group in (0, 1)]
    assert make.bucketed(*results) == ["ab", "ab"]


def test_process_groups_stay_apart() -> None:
    make = Maker()
    x = make.input()
    results = [make.gather(x, "a"), make.gather(x, "b", name="1"), make.reduce(x, "a"), make.reduce(x, "b", name="1")]
    assert make.bucketed(*results) == ["a", "b", "a", "b"]


def test_kinds_and_dtypes_of_reductions_stay_apart() -> None:
    make = Maker()
    x, y = make.input(), make.input(torch.float64)
    results = [make.reduce(x, "a"), make.reduce(y, "b"), make.reduce(x, "c"), make.reduce(y, "d")]
    assert make.bucketed(*results, make.reduce(x, "e", kind="sum")) == ["ac", "bd", "e"]


def test_dtypes_of_gathers_may_differ() -> None:
    make = Maker()
    assert make.bucketed(make.gather(make.input(), "a"), make.gather(make.input(torch.bfloat16), "b")) == ["ab"]


def test_the_second_run_of_a_module_has_its_own_bucket() -> None:
    make = Maker()
    x, y = make.input(), make.input()
    results = [make.gather(x, "a"), make.gather(y, "b"), make.gather(x, "a"), make.gather(y, "b")]
    assert make.bucketed(*results) == ["ab", "ab"]


def test_what_uses_an_early_result_moves_behind_the_bucket() -> None:
    make = Maker()
    x, y = make.input(), make.input()
    early = make.double(make.double(make.reduce(x, "a")))
    late = make.reduce(make.double(y), "b")
    assert make.bucketed(early, late) == ["ab"]


def test_casts_of_shards_move_up() -> None:
    make = Maker()
    x, y = make.input(), make.input()
    a = make.double(make.gather(x, "a"))
    assert make.bucketed(a, make.gather(make.double(y), "b")) == ["ab"]


def test_a_reduction_of_a_reduction_stays_apart() -> None:
    make = Maker()
    a = make.reduce(make.input(), "a")
    b = make.reduce(make.stack(a, a), "b")
    c = make.reduce(make.input(), "c")
    assert make.bucketed(a, b, c) == ["ac", "b"]


def test_a_gather_of_a_gather_stays_apart() -> None:
    make = Maker()
    b = make.gather(make.gather(make.input(), "a"), "b")
    assert make.bucketed(b, make.gather(make.input(), "c")) == ["ac", "b"]


def test_two_buckets_make_no_cycle_between_them() -> None:
    """b of group 0 needs a of group 1, and b of group 1 needs a of group 0: only one of the groups can merge."""
    make = Maker()
    a0, a1 = make.reduce(make.input(), "a", group=0), make.reduce(make.input(), "a", group=1)
    b0 = make.reduce(make.stack(a1, a1), "b", group=0)
    b1 = make.reduce(make.stack(a0, a0), "b", group=1)
    assert make.bucketed(b0, b1) == ["a", "ab", "b"]


def test_members_that_need_each_other_crosswise_make_two_buckets() -> None:
    """c needs a, and b needs d: merging a with b and c with d would be a cycle."""
    make = Maker()
    a, d = make.reduce(make.input(), "a"), make.reduce(make.input(), "d")
    c, b = make.reduce(make.stack(a, a), "c"), make.reduce(make.stack(d, d), "b")
    assert make.bucketed(a, b, c, d) == ["ad", "bc"]
