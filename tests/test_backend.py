"""How the passes get into ``torch.compile``: with which backends, beside a user's own passes, and nowhere else."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import Stages, fake_world, graphs_of, run_step
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, GraphModule

from fsdp_compile import backend, fully_shard, torch_compat, traced_ops
from fsdp_compile.group_ops import FREE
from fsdp_compile.passes import copy_graph
from fsdp_compile.passes.graph_view import WAIT, frees, gathers, reductions


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


def two_blocks() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)  # type: ignore[return-value]


X = torch.ones(3, 4)


# -- which backends run the passes ------------------------------------------------------------------------------------


def unknown(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
    return gm.forward


def wrapped(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
    return backend.fsdp_eager(gm, inputs)


def inductor_by_hand(gm: GraphModule, inputs: Any) -> Any:
    return compile_fx(gm, inputs)


WITH_PASSES: dict[str, dict[str, Any]] = {
    "default": {},
    "inductor": {"backend": "inductor"},
    "mode": {"mode": "max-autotune-no-cudagraphs"},
    "mode default": {"mode": "default"},
    "options": {"options": {"max_autotune": False}},
    "fsdp": {"backend": "fsdp"},
    "fsdp, options": {"backend": "fsdp", "options": {"max_autotune": False}},
    "fsdp, mode": {"backend": "fsdp", "mode": "reduce-overhead"},
    "fsdp_eager": {"backend": "fsdp_eager"},
    "the function fsdp": {"backend": backend.fsdp},
    "the function fsdp_eager": {"backend": backend.fsdp_eager},
    "dynamic": {"dynamic": False},
}
WITHOUT_PASSES: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager"},
    "aot_eager_decomp_partition": {"backend": "aot_eager_decomp_partition"},
    "eager": {"backend": "eager"},
    "unknown": {"backend": unknown},
    "partial": {"backend": functools.partial(unknown)},
    "wrapped": {"backend": wrapped},  # what is inside cannot be seen: better no frees than unrestored ones
    "wrapped partial": {"backend": functools.partial(backend.fsdp_eager)},
    "object": {"backend": CompileCounterWithBackend("fsdp_eager")},
    "inductor by hand": {"backend": inductor_by_hand},
}


def freed_by(graph: Graph) -> int:
    """How many tensors a graph of Dynamo's frees."""
    return sum(len(some) for node in graph.nodes if node.target is traced_ops.free for some in node.args[2])


def frees_given_to(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **compile_arguments: Any) -> int:
    """Trace, and count the frees in what Dynamo gives to the backend; the backend itself does not run."""
    found: list[int] = []

    def take(self: Any, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(freed_by(gm.graph))
        return gm.forward

    monkeypatch.setattr(OutputGraph, "call_user_compiler", take)
    torch.compile(model, fullgraph=True, **compile_arguments)(X)
    (count,) = found
    return count


@pytest.mark.parametrize("arguments", WITH_PASSES.values(), ids=WITH_PASSES.keys())
def test_frees_are_traced_where_the_passes_run(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    assert frees_given_to(monkeypatch, two_blocks(), **arguments) == 4  # two parameters of two blocks


@pytest.mark.parametrize("arguments", WITHOUT_PASSES.values(), ids=WITHOUT_PASSES.keys())
def test_no_frees_are_traced_elsewhere(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    assert frees_given_to(monkeypatch, two_blocks(), **arguments) == 0


@pytest.mark.parametrize("name", ["aot_eager", "eager"])
def test_other_backends_train(name: str) -> None:
    model = two_blocks()
    run_step(torch.compile(model, backend=name, fullgraph=True), X)
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("arguments", WITH_PASSES.values(), ids=WITH_PASSES.keys())
def test_gradients_set_aside_are_added(arguments: dict[str, Any]) -> None:
    """By an operator of ours in the graph, whatever generates the code."""
    model = two_blocks()
    compiled = torch.compile(model, fullgraph=True, **arguments)
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        run_step(compiled, X)
    assert all(param.grad is not None for param in model.parameters())


def test_the_passes_run_where_nothing_is_freed() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with backend.observed(lambda stage, graph: stages.append(stage)):
        stages: list[str] = []
        run_step(torch.compile(model, fullgraph=True), torch.ones(2, 4))
    assert "forward after" in stages


def test_reports_are_kept_for_observers_only() -> None:
    with backend.observed(lambda stage, graph: None) as reports:
        run_step(torch.compile(two_blocks(), backend="fsdp_eager", fullgraph=True), X)
    assert "bucket" in {report.name for report in reports}
    count = len(reports)
    torch.compiler.reset()
    run_step(torch.compile(two_blocks(), backend="fsdp_eager", fullgraph=True), X)
    assert len(reports) == count
    assert not backend._context.reports


def test_install_into() -> None:
    default = torch_compat.inductor_backend()
    assert not backend.passes_will_run(default)
    backend.install_into(default)
    assert backend.passes_will_run(default)
    installed = dict(default.config)
    backend.install_into(default)
    assert default.config == installed  # once is enough
    backend.install_into(unknown)
    assert not backend.passes_will_run(unknown)
    assert not backend.passes_will_run(None)


# -- Inductor ---------------------------------------------------------------------------------------------------------


def launches(code: str) -> list[str]:
    """Names of the collectives launched in a wrapper's code, in order; asserts that each is waited for later."""
    kinds: list[str] = []
    pending: set[str] = set()
    parts: dict[str, str] = {}  # output of a coalesced launch -> the launch
    unpacked: dict[str, int] = {}
    for line in code.splitlines():
        if match := re.search(r"(\w+) = torch\.ops\._c10d_functional\.(\w+)\.default\((.*), '\w+'\)", line):
            name, kind, arguments = match.groups()
            kinds.append(kind)
            if kind.endswith("_coalesced"):
                unpacked[name] = arguments.partition("]")[0].count(",") + 1
            else:
                pending.add(name)
        elif match := re.search(r"_c10d_functional\.wait_tensor\.default\((\w+)\)", line):
            pending.remove(match[1])  # else a second wait, or one before its launch
        elif (match := re.search(r"(\w+) = (\w+)\[\d+\]$", line)) and match[2] in unpacked:
            parts[match[1]] = match[2]
            pending.add(match[1])
        elif pending and re.search(r"extern_kernels|cpp_fused", line):
            used = pending.intersection(re.findall(r"\w+", line))
            assert not used, f"reads {used} before the wait: {line}"
    assert not pending, f"never waited for: {pending}"
    assert unpacked == {name: list(parts.values()).count(name) for name in unpacked}
    return kinds


def launches_in(graph: Graph) -> list[str]:
    starts = {found.start for found in (*gathers(graph), *reductions(graph))}
    return [node.target.__name__.removesuffix(".default") for node in graph.nodes if node in starts]


def test_emitted_code_has_the_buckets_in_order() -> None:
    stages: Stages = []
    with fresh_cache(), backend.observed(lambda stage, graph: stages.append((stage, copy_graph(graph)))):
        _, (forward, backward) = run_and_get_code(run_step, torch.compile(two_blocks(), fullgraph=True), X)
    graphs = dict(stages)
    gather, many, reduction = "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor"
    assert launches(forward) == launches_in(graphs["forward after"]) == [many] * 3
    # The first block's weight is not needed in the backward, as its input requires no gradient, nor are biases.
    assert launches(backward) == launches_in(graphs["backward after"]) == [gather] + [reduction] * 3
    for graph in graphs.values():
        assert sum(node.target is WAIT for node in graph.nodes) > 0
    assert not frees(graphs["forward after"])


def test_the_check_of_emitted_code_finds_an_early_read() -> None:
    launch = "buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')"
    wait = "torch.ops._c10d_functional.wait_tensor.default(buf0)"
    use = "extern_kernels.mm(buf0, arg, out=buf2)"
    assert launches("\n".join([launch, wait, use])) == ["all_gather_into_tensor"]
    for wrong in ([launch, use, wait], [launch, use]):
        with pytest.raises(AssertionError):
            launches("\n".join(wrong))


@pytest.mark.parametrize("arguments", [{"mode": "max-autotune-no-cudagraphs"}, {"backend": "fsdp"}], ids=str)
def test_inductor_trains(arguments: dict[str, Any]) -> None:
    model = two_blocks()
    run_step(torch.compile(model, fullgraph=True, **arguments), X)
    assert all(param.grad is not None for param in model.parameters())


class UsersPass(CustomGraphPass):
    """Notes how many frees it sees; our passes leave none."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append(sum(node.target is FREE for node in graph.nodes))

    def uuid(self) -> None:
        return None  # not cached, so it runs


class UsersPartitioner(CustomPartitionerFn):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        self.calls += 1
        return torch_compat.min_cut_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("where", ["options", "options of fsdp", "global configuration"])
def test_passes_of_the_user_run_before_ours(where: str) -> None:
    first, second, late, partitioner = UsersPass(), UsersPass(), UsersPass(), UsersPartitioner()
    settings = {
        "joint_custom_pre_pass": first if where == "options" else [first, second],
        "post_grad_custom_post_pass": late,
        "custom_partitioner_fn": partitioner,
    }
    arguments = {"backend": "fsdp"} if where == "options of fsdp" else {}
    if where != "global configuration":
        stages = graphs_of(two_blocks(), X, backend_name=arguments.get("backend", "inductor"), options=settings)
    else:
        with inductor_config.patch(settings):
            stages = graphs_of(two_blocks(), X, backend_name="inductor")
            assert inductor_config.joint_custom_pre_pass == [first, second]
    assert first.seen == [2]  # the groups of two blocks
    assert second.seen == ([] if where == "options" else [2])
    assert late.seen == [0, 0]  # forward and backward
    assert partitioner.calls == 1
    assert [stage for stage, _ in stages][-1] == "backward after"


# -- and nowhere else -------------------------------------------------------------------------------------------------


def all_settings() -> list[dict[str, Any]]:
    configs = (inductor_config, functorch_config, torch._dynamo.config)
    return [config.get_config_copy() for config in configs]  # type: ignore[attr-defined]


def test_global_configuration_stays() -> None:
    before = all_settings()
    run_step(torch.compile(two_blocks(), fullgraph=True), X)
    assert all_settings() == before


def test_other_models_do_not_run_the_passes() -> None:
    seen: list[str] = []
    with backend.observed(lambda stage, graph: seen.append(stage)), fresh_cache():
        run_step(torch.compile(nn.Linear(4, 4), fullgraph=True), X)
    assert not seen


def test_importing_changes_no_setting() -> None:
    script = """
import torch, torch._dynamo, torch._inductor.config as inductor, torch._functorch.config as functorch
configs = (inductor, functorch, torch._dynamo.config)
before = [config.get_config_copy() for config in configs]
import fsdp_compile, fsdp_compile.models
assert [config.get_config_copy() for config in configs] == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
