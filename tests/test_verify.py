"""The verifier: it accepts what the passes make of real models, and names the node where a graph is broken on purpose.

Graphs are broken as ``broken_graphs`` says, in every configuration that has something of the kind to break.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from broken_graphs import (
    OF_GRAPHS,
    OF_PASSES,
    Break,
    drops_a_reduction,
    free_behind,
    launches_out_of_order,
    reads_what_comes_later,
    save,
    saves_a_whole_parameter,
)
from fake_world import Stages, fake_world, graphs_of, run_step
from schedules import schedule as graph_of_schedule
from test_feature_snapshots import BF16, FEATURES, RANKS, ROWS, WIDTH, shard
from test_passes_gloo import by_gloo
from torch.fx import Graph

from fsdp_compile import backend, passes
from fsdp_compile.passes import (
    InvalidGraph,
    MemoryProfile,
    PassConfig,
    PassContext,
    accumulate,
    copy_graph,
    for_gloo,
    fuse_copies,
    stages,
    verified,
    verify,
    verify_ranks,
)
from fsdp_compile.passes import schedule as schedule_pass
from fsdp_compile.passes.graph_view import frees, gathers, kept_slices, reductions
from fsdp_compile.passes.stages import PASSES

Parts = dict[str, Graph]


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for child in self[:2]:
                x = torch.tanh(child(x))
        return super().forward(x)


def twice(**kwargs: Any) -> nn.Module:
    return shard(Twice(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), **kwargs)


def uneven(**kwargs: Any) -> nn.Module:
    return shard(nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH), nn.LayerNorm(WIDTH)), **kwargs)


CHOICES: dict[str, dict[str, Any]] = {
    "modules": {},
    "each alone": {"bucket": "none"},
    "by size": {"bucket": 1000},
    "auto": {"bucket": "auto", "hardware": "h100"},
    "auto in memory": {"bucket": "auto", "hardware": "h100", "memory_budget": 3000},
    "traced order": {"schedule": False},
    "little memory": {"memory_budget": 0},
    "much memory": {"memory_budget": 1 << 30},
    "kept": {"regather": "auto", "hardware": "h100"},
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": shard,
    "bf16": lambda: shard(mp_policy=BF16),
    "uneven": lambda: uneven(mp_policy=BF16),
    "not resharded": lambda: shard(reshard_after_forward=False),
    "twice": twice,
    **{build.__name__: build for build in FEATURES},
}
CASES = [(model, "modules") for model in MODELS]
CASES += [(model, choice) for model in ("bf16", "twice") for choice in CHOICES if choice != "modules"]
cases = pytest.mark.parametrize("model, choice", CASES, ids=[": ".join(case) for case in CASES])
a_few = pytest.mark.parametrize("model, choice", [("bf16", "modules"), ("twice", "each alone"), ("hsdp", "by size")])


@cache
def stages_of(model: str, choice: str) -> Stages:
    with fake_world(RANKS), backend.configured(verify=True, **CHOICES[choice]):
        return graphs_of(MODELS[model](), torch.ones(ROWS, WIDTH))


def parts_of(model: str, choice: str, when: str = "after", gloo: bool = False) -> Parts:
    """Copies of the forward and of the backward."""
    graphs = dict(stages_of(model, choice))
    parts = {name: copy_graph(graphs[f"{name} {when}"]) for name in ("forward", "backward")}
    with by_gloo():
        for graph in parts.values() if gloo else ():
            for_gloo(graph, PassContext())
    return parts


def named(caught: pytest.ExceptionInfo[InvalidGraph]) -> Any:
    return caught.value.node


# -- what is right ----------------------------------------------------------------------------------------------------


@cases
def test_real_graphs_are_accepted(model: str, choice: str) -> None:
    """After each pass, as they are compiled, and as they run on gloo."""
    verify("all", parts_of(model, choice))
    parts = parts_of(model, choice)
    with by_gloo(), verified("for_gloo", parts, PassConfig()):
        assert all([for_gloo(graph, PassContext()) for graph in parts.values()])


def test_a_forward_without_backward_is_accepted() -> None:
    with torch.no_grad(), fake_world(RANKS), backend.configured(verify=True):
        (_, _), (_, after) = graphs_of(shard(), torch.ones(ROWS, WIDTH))
    verify("all", {"inference": after})


# -- rules of graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OF_GRAPHS, ids=lambda way: way.__name__)
def test_a_broken_graph(way: Break) -> None:
    """In all configurations and in forward and backward, with collectives as on NCCL and as on gloo."""
    broken = 0
    for (case, gloo), part in product(zip(CASES, cycle((True, False))), ("forward", "backward")):
        parts = parts_of(*case, gloo=gloo)
        expected = way(parts[part])
        if expected is not None:
            broken += 1
            with pytest.raises(InvalidGraph) as caught:
                verify("a pass", parts)
            assert named(caught) is expected, (case, part, str(caught.value))
            assert caught.value.after == "a pass" and caught.value.part == part
            assert str(expected) in str(caught.value)
    assert broken > 2


@a_few
def test_frees_after_the_last_read_are_accepted(model: str, choice: str) -> None:
    parts = parts_of(model, choice)
    for graph in parts.values():
        (output,) = graph.find_nodes(op="output")
        for gather in gathers(graph):
            for param in gather.params:
                if output not in {user for node in param.made for user in node.users}:
                    free_behind(output.prev, param.wait, param.tag)
    verify("frees", parts)


def test_a_whole_parameter_is_saved() -> None:
    """That the joint graph has freed; in place of a shard."""
    for case in CASES:
        parts = parts_of(*case, when="before")
        expected = saves_a_whole_parameter(*parts.values())
        if expected is not None:
            with pytest.raises(InvalidGraph) as caught:
                verify("partitioning", parts)
            assert named(caught) is expected


def test_a_backward_of_another_forward() -> None:
    parts = {**parts_of("plain", "modules"), "backward": parts_of("fewer_ranks", "modules")["backward"]}
    with pytest.raises(InvalidGraph, match="the backward graph takes") as caught:
        verify("partitioning", parts)
    assert named(caught).op == "output"


# -- rules of passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OF_PASSES, ids=lambda way: way.__name__)
def test_a_broken_pass(way: Break) -> None:
    broken = 0
    for case in CASES:
        for part in ("forward", "backward"):
            parts = parts_of(*case)
            with pytest.raises(InvalidGraph) if way(copy_graph(parts[part])) else nullcontext() as caught:
                with verified("fuse_copies", parts, PassConfig(memory_budget=1 << 40)):
                    expected = way(parts[part])
            if expected is not None:
                broken += 1
                assert named(caught) is expected, (case, part, str(caught.value))
    assert broken > 10


def test_a_free_is_lost() -> None:
    """``regather`` takes all frees out, and no other pass any."""
    joint = copy_graph(dict(stages_of("bf16", "modules"))["joint before"])
    with pytest.raises(InvalidGraph, match="no frees any more") as caught:
        with verified("regather", {"joint": without_reads_of_freed(joint)}, PassConfig()):
            pass
    assert named(caught) in frees(joint)
    with pytest.raises(InvalidGraph, match="frees of .*, as before") as caught:
        with verified("keep_slices", {"joint": joint}, PassConfig()):
            expected = frees(joint)[-1]
            joint.erase_node(expected)
    assert named(caught) is expected


def without_reads_of_freed(joint: Graph) -> Graph:
    """All frees at the end, as in a joint graph the backward reads what the forward has freed."""
    (output,) = joint.find_nodes(op="output")
    for kept in kept_slices(joint):
        for node in reversed(kept.nodes):
            joint.erase_node(node)
    for free in frees(joint):
        output.prepend(free)
    return joint


def test_a_gradient_is_reduced_twice() -> None:
    """Before ``accumulate``, where a module runs twice, and after it no more."""
    parts = parts_of("twice", "modules", when="before")
    with verified("keep_slices", parts, PassConfig()):
        pass
    with pytest.raises(InvalidGraph, match="expected one reduce_scatter") as caught:
        with verified("accumulate", parts, PassConfig()):
            pass
    assert len([each for each in reductions(parts["backward"]) if each.start is named(caught)]) == 1
    with verified("accumulate", parts, PassConfig()):
        accumulate(parts["backward"], PassContext())


def test_more_is_kept_unsharded() -> None:
    parts = parts_of("bf16", "modules")
    whole = next(gathers(parts["forward"])).waits[0]
    with pytest.raises(InvalidGraph, match="saved for the backward") as caught:
        with verified("fuse_copies", parts, PassConfig()):
            save(whole, *parts.values())
    assert named(caught) is whole


# -- order and memory -------------------------------------------------------------------------------------------------


FIVE = " ".join(f"{letter} /{letter} {letter.upper()}=1" for letter in "abcde")


def test_schedule_leaves_the_eager_order() -> None:
    """Without a budget that is the same on all ranks."""
    parts = parts_of("plain", "each alone", when="before")
    with verified("schedule", parts, PassConfig()):
        schedule_pass([*parts.values()], PassContext())
    with pytest.raises(InvalidGraph, match="as in the eager order") as caught:
        with verified("schedule", parts, PassConfig()):
            expected = launches_out_of_order(parts["forward"])
            (last,) = (node for node in parts["forward"].nodes if node.next is expected)
    assert named(caught) is last


@pytest.mark.parametrize("name", ["schedule", "dedup", "fuse_copies"])
def test_memory_over_the_budget(name: str) -> None:
    """All gathers at once, in their order."""
    with fake_world(size=2):
        graph = graph_of_schedule(FIVE)
        config = PassConfig(memory_budget=0)
        with verified(name, {"inference": graph}, config):
            pass
        with pytest.raises(InvalidGraph, match="live bytes") as caught:
            with verified(name, {"inference": graph}, config):
                launch_all_first(graph)
        profile = MemoryProfile.of([graph])
        assert named(caught) is profile.at_peak and str(profile.peak) in str(caught.value)


@pytest.mark.parametrize(
    "budget, default, fits",
    [(0, None, False), (1 << 40, None, True), (None, None, False), (None, 1 << 40, True), (0, 1 << 40, False)],
)
def test_schedule_may_fill_its_budget(budget: int | None, default: int | None, fits: bool) -> None:
    with fake_world(size=2):
        graph = graph_of_schedule(FIVE)
        with nullcontext() if fits else pytest.raises(InvalidGraph, match="live bytes"):
            with verified("schedule", {"inference": graph}, PassConfig(memory_budget=budget), default):
                launch_all_first(graph)


def launch_all_first(graph: Graph) -> None:
    first = next(gathers(graph)).start
    for gather in list(gathers(graph))[1:]:
        first.append(gather.start)
        first = gather.start


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_ranks_launch_the_same() -> None:
    """On one of them the last gather is launched first."""
    broken = 0
    for case in CASES:
        ranks = [parts_of(*case) for _ in range(3)]
        verify_ranks("all", ranks)
        expected = launches_out_of_order(ranks[2]["forward"])
        if expected is not None:
            broken += 1
            with pytest.raises(InvalidGraph, match="on rank 2") as caught:
                verify_ranks("all", ranks)
            assert named(caught) is expected.prev
    assert broken > 2


def test_a_rank_launches_less() -> None:
    ranks = [parts_of("bf16", "modules") for _ in range(3)]
    dropped = drops_a_reduction(ranks[2]["backward"])
    (found,) = [each.start for each in reductions(ranks[0]["backward"]) if each.start.name == dropped.name]
    with pytest.raises(InvalidGraph, match="on rank 2") as caught:
        verify_ranks("all", ranks)
    assert str(found) in str(caught.value)


# -- in use -----------------------------------------------------------------------------------------------------------


def broken_pass(graph: Graph, context: PassContext) -> Any:
    """``fuse_copies``, and then a wait stands before its launch."""
    report = fuse_copies(graph, context)
    reads_what_comes_later(graph)
    return report


def test_a_compile_names_the_pass_and_the_node() -> None:
    message = "after fuse_copies, wait_tensor.* in the forward graph: expected .* before it"
    with patch.object(passes, "fuse_copies", broken_pass), fake_world(RANKS):
        with backend.configured(verify=True), pytest.raises(Exception, match=message):
            graphs_of(shard(), torch.ones(ROWS, WIDTH))


@pytest.mark.parametrize("asked", [True, False])
def test_every_pass_is_verified_if_that_is_asked_for(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def note(name: str, *_: Any) -> Any:
        ran.append(name)
        return nullcontext()

    monkeypatch.setattr(stages, "verified", note)
    with fake_world(RANKS), backend.configured(verify=asked), backend.observed(lambda *_: None) as reports:
        run_step(torch.compile(shard(), backend="fsdp_eager", fullgraph=True), torch.ones(ROWS, WIDTH))
    assert [*dict.fromkeys(report.name for report in reports)] == [*PASSES]
    assert ran == ([*PASSES] if asked else [])


def test_it_changes_no_key() -> None:
    assert PassConfig(verify=True).digest() == PassConfig().digest()
