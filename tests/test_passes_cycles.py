"""Merging collectives that depend on each other, directly or through others, would be a cycle: these stay apart."""

from __future__ import annotations

from graph_maker import GraphMaker, launches, run_pass
from simulated_ranks import same_bits
from torch.fx import Node

from fsdp_compile.passes import bucket


def bucketed(make: GraphMaker, *outputs: Node) -> list[str]:
    """Run the pass, check that results are the same, and return the parameters of each launch in order."""
    graph = make.finish(*outputs)
    assert same_bits(*run_pass(bucket, graph))
    return launches(graph)


def test_a_reduction_of_a_reduction() -> None:
    make = GraphMaker()
    a = make.reduce(make.input(), "a")
    b = make.reduce(make.stack(a, a), "b")
    assert bucketed(make, a, b, make.reduce(make.input(), "c")) == ["ac", "b"]


def test_a_gather_of_a_gather() -> None:
    make = GraphMaker()
    b = make.gather(make.gather(make.input(), "a"), "b")
    assert bucketed(make, b, make.gather(make.input(), "c")) == ["ac", "b"]


def test_two_groups_that_need_each_other() -> None:
    """b of group 0 needs a of group 1, and b of group 1 needs a of group 0: only one of the groups can merge."""
    make = GraphMaker()
    a0, a1 = make.reduce(make.input(), "a", group=0), make.reduce(make.input(), "a", group=1)
    b0 = make.reduce(make.stack(a1, a1), "b", group=0)
    b1 = make.reduce(make.stack(a0, a0), "b", group=1)
    assert bucketed(make, b0, b1) == ["a", "ab", "b"]


def test_members_that_need_each_other_crosswise() -> None:
    """c needs a, and b needs d: merging a with b and c with d would be a cycle."""
    make = GraphMaker()
    a, d = make.reduce(make.input(), "a"), make.reduce(make.input(), "d")
    c, b = make.reduce(make.stack(a, a), "c"), make.reduce(make.stack(d, d), "b")
    assert bucketed(make, a, b, c, d) == ["ad", "bc"]


def test_what_uses_an_early_result_moves_behind_the_bucket() -> None:
    make = GraphMaker()
    x, y = make.input(), make.input()
    early = make.double(make.double(make.reduce(x, "a")))
    assert bucketed(make, early, make.reduce(make.double(y), "b")) == ["ab"]
