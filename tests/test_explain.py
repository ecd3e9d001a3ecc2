"""What ``explain`` tells of the graphs: it is what the passes did, of the right graphs, and little is kept for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, run_step
from models import Net, shard
from snapshots import assert_snapshot
from torch._inductor.utils import fresh_cache

from fsdp_compile import Explanation, MixedPrecisionPolicy, backend, compiled_graphs, explain, fully_shard
from fsdp_compile.explain import ALL_CACHES_OFF, GraphRun, ModuleRun
from fsdp_compile.last_run import is_of_torch
from fsdp_compile.passes import Traffic, evaluate
from fsdp_compile.passes.graph_view import gathers, reductions, whole_bytes
from fsdp_compile.passes.machine import cost_model

DIM = 16
X = torch.ones(4, DIM)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(4), backend.configured(hardware="h100"):
        yield


def net(blocks: int = 2) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(Net(DIM, blocks), fully_shard, mp_policy=policy)


def step(model: nn.Module, backend_name: str = "fsdp_eager") -> Explanation:
    run_step(torch.compile(model, backend=backend_name, fullgraph=True), X)
    return explain(model)


def observed(model: nn.Module) -> tuple[Stages, GraphRun]:
    stages = graphs_of(model, X)
    (graph,) = explain(model).graphs
    return stages, graph


def test_text_of_many_blocks() -> None:
    """Each kind of line once, however many blocks there are, and what the passes did."""
    backend.configure(measure=True)
    text = str(step(net(blocks=8)))
    assert_snapshot("explain", text + "\n")
    assert len(text.splitlines()) < 40 < len(step(net(blocks=8)).details.splitlines())


def test_collectives_are_those_of_the_graphs() -> None:
    stages, graph = observed(net())
    assert graph.summary is not None and graph.modules == ("", "blocks.0", "blocks.1")
    for part in graph.summary.parts:
        after = dict(stages)[f"{part.name} after"]
        there = sorted([*gathers(after), *reductions(after)], key=lambda each: each.start)
        assert [move.params for move in part.moves] == [each.tag.params for each in there]
        assert [move.bytes for move in part.moves] == [whole_bytes(each.start) for each in there]
        assert part.traffic == Traffic.of(after)


def test_groups_that_a_bucket_spans_are_told_apart() -> None:
    backend.configure(bucket="100MB")
    _, graph = observed(net())
    assert graph.summary is not None
    found = {group.name: group.params for group in graph.summary.groups}
    assert set(found) == {"(root)", "blocks.0", "blocks.1"} and len(graph.summary.parts[0].moves) == 1
    assert all(name.startswith("blocks.1.") for name in found["blocks.1"]) and len(found["blocks.1"]) == 6


def test_times_are_those_of_the_simulation() -> None:
    stages, graph = observed(net())
    graphs = [dict(stages)["forward after"], dict(stages)["backward after"]]
    result = evaluate(graphs, cost_model(graphs, "h100"))
    assert graph.summary is not None and graph.summary.machine == "h100"
    assert graph.summary.seconds == pytest.approx(result.timeline.seconds)
    assert graph.summary.exposed == pytest.approx(result.timeline.exposed_seconds)
    assert graph.summary.peak == result.memory.peak
    assert all(bool(move.reason) is (move.exposed > 0) for part in graph.summary.parts for move in part.moves)


def test_where_collectives_are_launched_and_waited_for() -> None:
    """In eager's order: each gather while the module before it computes; the first reduction while the last does."""
    with backend.configured(schedule=False):
        _, graph = observed(net(blocks=3))
    assert graph.summary is not None
    forward, backward = graph.summary.parts
    places = {move.name: (move.launched, move.waited) for move in forward.moves}
    assert places["blocks.1"] == ("in blocks.0", "before blocks.1") and places["(root)"][1] == "before (root)"
    reduced = {move.name: (move.launched, move.waited) for move in backward.moves if move.kind == "reduce_scatter"}
    assert reduced["blocks.2"] == ("in blocks.2", "in blocks.2") and reduced["(root)"][1] == "at the end"


def test_a_pass_is_told_of_both_graphs_together() -> None:
    stages, graph = observed(net())
    before, after = (
        [dict(stages)[f"{part} {when}"] for part in ("forward", "backward")] for when in ("before", "after")
    )
    passes = {report.name: report for report in graph.passes}
    assert passes["bucket"].before.gathers == sum(Traffic.of(each).gathers for each in before) == 24
    assert passes["fuse_copies"].after == Traffic.of(after[0]) + Traffic.of(after[1])


def test_inference() -> None:
    model = net()
    with torch.no_grad():
        (graph,) = step(model).graphs
    assert graph.summary is not None and [part.name for part in graph.summary.parts] == ["inference"]


@pytest.mark.parametrize("backend_name", ["inductor", "fsdp"])
def test_inductor(backend_name: str) -> None:
    """Its hook runs the first pass twice, which is told once."""
    with fresh_cache():
        (graph,) = step(net(), backend_name).graphs
    names = [report.name for report in graph.passes]
    assert names == list(dict.fromkeys(names)) and graph.passes[0].name == "regather" and graph.passes[0].changes


# -- which graph ------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, width), nn.Linear(width, DIM)) for width in widths)
        for block in self.blocks:
            fully_shard(block).compile(backend="fsdp_eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_blocks_share_a_graph() -> None:
    """All but the first, whose input needs no gradient."""
    model = Blocks(8, 8, 24, 8)
    run_step(model, X)
    explanation = explain(model)
    assert [graph.modules for graph in explanation.graphs] == [("blocks.0",), ("blocks.1", "blocks.3"), ("blocks.2",)]
    assert [run.name for run in explanation.modules] == [f"blocks.{index}" for index in range(4)]
    sizes = [graph.summary.parts[0].moves[0].bytes for graph in explanation.graphs if graph.summary]
    assert len(sizes) == 3 and sizes[0] == sizes[1] < sizes[2]


def test_models_are_not_mixed_up() -> None:
    """Of one class, compiled in turn, with a reset in between, after which Dynamo counts anew."""
    first, second = net(blocks=1), net(blocks=2)
    of_first = step(first)
    torch.compiler.reset()
    of_second = step(second)
    assert explain(first) == of_first and explain(second) == of_second
    captured = [len(each.graphs[0].summary.groups) for each in (of_first, of_second) if each.graphs[0].summary]
    assert captured == [2, 3]


def test_the_last_forward_counts() -> None:
    model = net()
    trained = step(model)
    with torch.no_grad():
        assert step(model).graphs != trained.graphs
    assert step(model).graphs == trained.graphs


def test_a_compile_cache_is_told() -> None:
    with fresh_cache():
        step(net(), "fsdp")
        torch.compiler.reset()
        explanation = step(net(), "fsdp")
        (graph,) = explanation.graphs
        assert graph.summary is None and not graph.passes and "compile cache" in graph.note
        assert ALL_CACHES_OFF in str(explanation)
        torch.compiler.reset()
        name, value = ALL_CACHES_OFF.removeprefix("TORCHINDUCTOR_").split("=")
        with torch._inductor.config.patch({name.lower(): bool(int(value))}):
            (graph,) = step(net(), "fsdp").graphs
        assert graph.summary is not None and not graph.note


def test_another_backend_is_told() -> None:
    (graph,) = step(net(), "aot_eager").graphs
    assert graph.note == "its backend does not run the passes"


def test_old_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graphs, "KEPT", 1)
    first, second = net(blocks=1), net(blocks=2)
    step(first)
    step(second)
    assert "more than 1 graphs were compiled since" in explain(first).graphs[0].note
    assert explain(second).graphs[0].summary is not None and len(compiled_graphs._known) == 1


def test_a_graph_that_cannot_be_simulated_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no such cost")

    monkeypatch.setattr(compiled_graphs, "summarize", fails)
    (graph,) = step(net()).graphs
    assert graph.note == "it could not be simulated: ValueError: no such cost" and graph.passes


def test_only_names_and_numbers_are_kept() -> None:
    def leaves(value: Any) -> Iterator[Any]:
        for each in value if isinstance(value, (list, tuple)) else [value]:
            yield from leaves(each) if isinstance(each, (list, tuple)) else [each]

    step(net())
    kept = compiled_graphs.known(max(compiled_graphs._known))
    assert kept is not None and kept.summary is not None
    assert {type(leaf) for leaf in leaves(astuple(kept))} <= {str, int, float, bool, type(None)}


# -- modules ----------------------------------------------------------------------------------------------------------


def test_what_can_be_explained() -> None:
    with pytest.raises(TypeError, match="explain expects a module, not 3"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no module under fully_shard"):
        explain(nn.Linear(2, 2))
    model = net()
    compiled = torch.compile(model, backend="fsdp_eager")
    run_step(compiled, X)
    assert explain(compiled) == explain(model)  # type: ignore[arg-type]


class Branches(nn.Module):
    """Two trees, one of which has a module without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())
        for module in (self.left, self.right[0], self.right):
            fully_shard(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def test_a_part_of_what_was_sharded_together() -> None:
    some, others = ([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)] for _ in range(2))
    fully_shard(some), fully_shard(others)
    assert [run.name for run in explain(nn.ModuleList([some[1], others[1]])).modules] == ["0", "1"]


def test_packages_whose_names_begin_like_torch_are_not_torch() -> None:
    packages = Path(torch.__file__).parent.parent
    assert is_of_torch(str(packages / "torch" / "nn" / "functional.py"))
    assert not is_of_torch(str(packages / "torchvision" / "models" / "resnet.py"))


@pytest.mark.parametrize("compiles", [True, False], ids=["compiled", "eager"])
def test_modules_of_several_roots_are_told_apart(compiles: bool) -> None:
    model = Branches()
    called = torch.compile(model, backend="fsdp_eager") if compiles else model
    run_step(called, X)
    assert explain(called) == explain(model)
    assert [run.name for run in explain(model).modules] == ["left", "right", "right.0"]
    assert "(root)" not in str(explain(model)).split("\n\n")[0]


def test_what_a_hook_on_a_block_does_to_others() -> None:
    """Code that broke at one module breaks for others of its class; it is said where from."""
    model = net(blocks=3)
    model.blocks[1].set_all_reduce_hook(lambda gradient: None)
    run_step(torch.compile(model, backend="fsdp_eager"), X)
    found = {run.name: str(run) for run in explain(model).modules}
    assert found["blocks.1"] == "eagerly: set_all_reduce_hook has no traced form"
    reason = "graph break at module 'blocks.1', which runs eagerly: set_all_reduce_hook has no traced form"
    assert found[""] == found["blocks.2"] == f"in several graphs: {reason}"
    assert found["blocks.0"] == "in a graph"


class Breaks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # here
        return super().forward(x)


def test_graph_breaks_are_told_with_their_modules() -> None:
    model = fully_shard(nn.Sequential(Breaks(DIM, DIM), nn.ReLU(), Breaks(DIM, DIM)))
    run_step(torch.compile(model, backend="fsdp_eager"), X)
    line = Breaks.forward.__code__.co_firstlineno + 1
    assert [(each.file, each.line, each.modules) for each in explain(model).breaks] == [(__file__, line, ("0", "2"))]
    assert f"graph break in 0, 2, {__file__}:{line}: " in str(explain(model))
    assert explain(fully_shard(nn.Linear(2, 2))).breaks == ()


# -- folding ----------------------------------------------------------------------------------------------------------


def folded(*names: str, why: str = "") -> list[str]:
    runs = tuple(ModuleRun(name, "in a graph", why) for name in names)
    return [re.split("  +", line)[0] for line in str(Explanation(runs)).splitlines()[1:]]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["", "a.0", "a.1", "a.2"], ["(root)", "a.0 … a.2"]),
        (["a.3", "a.2", "a.1"], ["a.3 … a.1"]),
        (["a.0", "a.1"], ["a.0", "a.1"]),
        (["a.0", "b.0", "a.1", "b.1"], ["a.0", "b.0", "a.1", "b.1"]),
        (["a.0", "a.1", "a.3", "a.4", "a.5"], ["a.0", "a.1", "a.3 … a.5"]),
        (["a.0", "b.0", "a.1", "b.1", "a.2", "b.2"], ["a.0 … a.2", "b.0 … b.2"]),
        (["a.0.b.0", "a.0.b.1", "a.0.b.2", "a.1.b.0"], ["a.0.b.0 … a.0.b.2", "a.1.b.0"]),
        (["a", "b", "c"], ["a", "b", "c"]),
    ],
)
def test_folded_lines(names: list[str], lines: list[str]) -> None:
    assert folded(*names) == lines


def test_only_what_is_alike_is_folded() -> None:
    runs = [ModuleRun(f"a.{index}", "eagerly", "for once" if index == 1 else "as ever") for index in range(5)]
    lines = str(Explanation(tuple(runs))).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["a.0", "a.1", "a.2 … a.4"]
