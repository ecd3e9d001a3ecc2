"""``fsdp-compile plan``: what a step will take, without ranks and without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from command import command
from fake_world import fake_world, graphs_of
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import backend, fully_shard, torch_compat
from fsdp_compile.factory import FactoryError, MakeBatch, language_model
from fsdp_compile.passes import PassConfig, Traffic, readable_size
from fsdp_compile.plan_table import as_table, shortfall
from fsdp_compile.planning import make_plan

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Breaks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    return torch.ones(5, WIDTH)


def net() -> tuple[nn.Module, MakeBatch]:
    return Net(), batch


def test_plans_what_is_then_compiled() -> None:
    plan = make_plan(net, 4)
    with fake_world(4):
        model = Net()
        for block in model.blocks:
            fully_shard(block)
        graphs = dict(graphs_of(fully_shard(model), batch(1, 0, 4)))
    assert plan.traffic == (Traffic.of(graphs["forward after"]), Traffic.of(graphs["backward after"]))
    assert plan.sharding == "each of the 3 modules in blocks, and the root"


def test_what_fills_the_memory() -> None:
    plan = make_plan(net, 4)
    parameters = 3 * (WIDTH * WIDTH + WIDTH) * 4 // 4
    assert plan.optimizer_bytes == plan.composition["optimizer state"] == 2 * parameters
    assert sum(plan.composition.values()) == plan.peak >= plan.least_peak > 3 * parameters
    assert plan.result.timeline.seconds >= plan.result.bounds.time_step > 0
    assert 0 <= plan.least_exposed <= plan.result.timeline.exposed_seconds


@pytest.mark.slow
def test_a_model_of_any_size() -> None:
    """8 billion parameters: on data they would take 32 GB. More ranks, less memory, and as much to gather."""
    few, many = (make_plan(language_model("llama3-8b", 1, 512), ranks) for ranks in (8, 64))
    assert few.optimizer_bytes > 7 * 2**30 > 6 * many.optimizer_bytes and few.peak > many.peak
    assert few.traffic[0].gathers == many.traffic[0].gathers == 33


def test_nothing_is_made_with_data() -> None:
    def factory() -> tuple[nn.Module, MakeBatch]:
        model = Net()
        assert all(param.is_meta for param in model.parameters())
        return model, batch

    make_plan(factory, 2)


def test_replicas_and_settings() -> None:
    plan = make_plan(net, 8, PassConfig(bucket="none"), replicas=2, reshard_after_forward=False)
    assert plan.traffic[0].gathers == 6 and plan.traffic[1].gathers == 0
    assert plan.traffic[1].all_reduces == plan.traffic[1].reductions == 6


def test_a_factory_that_shards() -> None:
    def factory() -> tuple[nn.Module, MakeBatch]:
        return fully_shard(Net(), mesh=init_device_mesh("cpu", (4,))), batch

    plan = make_plan(factory, 4)
    assert plan.sharding == "by the factory" and plan.traffic[0].gathers == 1


@pytest.mark.parametrize("how", [{"replicas": 2}, {"reshard_after_forward": True}], ids=["replicas", "reshard"])
def test_what_the_factory_has_chosen_is_not_chosen_again(how: dict[str, Any]) -> None:
    with pytest.raises(FactoryError, match="the factory has sharded its model"):
        make_plan(lambda: (fully_shard(Net(), mesh=init_device_mesh("cpu", (4,))), batch), 4, **how)


def test_the_configuration_stays() -> None:
    before = backend.configuration()
    make_plan(net, 2, PassConfig(bucket="auto", hardware="a100"))
    assert backend.configuration() == before


def frozen() -> tuple[nn.Module, MakeBatch]:
    return Net().requires_grad_(False), batch


@pytest.mark.parametrize(
    ("factory", "ranks", "replicas", "error", "says"),
    [
        (net, 4, 3, ValueError, "4 ranks do not divide into 3 replicas"),
        (net, 2, 2, ValueError, "two shards or more"),
        (net, 1, 1, ValueError, "1 ranks"),
        (lambda: Net(), 2, 1, FactoryError, r"must return \(model, make_batch\)"),
        (frozen, 2, 1, FactoryError, "gives no loss"),
        (lambda: (Breaks(), batch), 2, 1, torch_compat.NOT_ONE_GRAPH, "graph_break"),
    ],
    ids=["replicas", "no shards", "one rank", "no batches", "frozen", "graph break"],
)
def test_what_cannot_be_planned(factory: Any, ranks: int, replicas: int, error: Any, says: str) -> None:
    before = backend.configuration()
    with pytest.raises(error, match=says):
        make_plan(factory, ranks, replicas=replicas)
    assert backend.configuration() == before and not torch.distributed.is_initialized()


def test_a_plan_needs_a_process_of_its_own() -> None:
    with fake_world(2), pytest.raises(RuntimeError, match="destroy the process group"):
        make_plan(net, 2)


def test_the_table() -> None:
    plans = [make_plan(net, ranks) for ranks in (2, 16)]
    lines = as_table(plans).splitlines()
    named = {line[:30].strip(): line[30:].split() for line in lines}
    assert named["ranks"] == ["2", "16"] and named["gathers"] == ["3", "+", "2"] * 2 and "replicas" not in named
    assert named["gathered"][:2] == named["gathered"][2:], "whole parameters, for any number of ranks"
    assert shortfall(plans[0], 2**20) == (
        f"2 ranks do not fit: {readable_size(plans[0].peak)} of 1 MiB; most of it: optimizer state, "
        f"{readable_size(plans[0].optimizer_bytes)}"
    )


def test_the_command() -> None:
    code, out, err = command(
        "plan", "debug", "--seq", "64", "--world-size", "2,8", "--memory", "1MiB", "--reshard", "2"
    )
    assert code == 1 and not err, "one does not fit"
    assert out.startswith("debug on h100, bfloat16, buckets: module\nsharded: each of the 2 modules in model.blocks")
    assert out.count("do not fit") == 1 and "\n2 ranks do not fit: " in out
    assert out.splitlines()[-1].startswith("  would fit: --world-size ")


def test_a_size_of_buckets_that_does_not_fit() -> None:
    """What would fit is looked for with the same buckets, if these are a number too."""
    code, out, err = command("plan", "debug", "--seq", "64", "--bucket", "100000", "--memory", "1KiB", "--reshard", "1")
    assert code == 1 and not err and out.splitlines()[-1].startswith("  nothing tried fits")


def test_meshes_side_by_side() -> None:
    code, out, err = command("plan", "debug", "--seq", "64", "--mesh", "1x8,2x4")
    rows = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
    assert code == 0 and not err and rows["ranks"] == ["8", "8"] and rows["replicas"] == ["1", "2"]


BREAKS_AT_LINE_5 = """import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y
factory = lambda: (Model(4, 4), lambda step, rank, world: torch.ones(2, 4))
"""


def test_a_graph_break_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BREAKS_AT_LINE_5)
    code, out, err = command("plan", f"{tmp_path}/model.py:factory")
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert "model.py:factory does not compile into one graph: " in err and err.endswith("model.py:5)\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["debug", "--mesh", "8"], "argument --mesh: must be replicas and shards like 4x8, not '8'"),
        (["debug", "--mesh", "2x1"], "2 ranks do not divide into 2 replicas of two shards or more"),
        (["debug", "--mesh", "2x4", "--world-size", "8"], "--mesh says how many ranks and replicas there are"),
        (["debug", "--memory", ""], "expected a size like 80GiB or 25MB, not ''"),
        (["debug", "--html", "."], "cannot write to ."),
        (["debug", "--html", "a", "--trace", "a"], "--trace and --html cannot both be written to a"),
        (["debug", "--reshard", "3"], "reshard_after_forward=3 should divide the number of shard ranks, 8"),
        (["debugg"], "unknown model 'debugg'; known are debug, "),
        (["debug", "--hardware", "h1000"], "unknown hardware profile 'h1000'; known are a100, "),
        (["debug", "--world-size", "8,x"], "argument --world-size: must be a whole number, not 'x'"),
        (["debug", "--memory", "80 cats"], "expected a size like 80GiB or 25MB, not '80 cats'"),
    ],
    ids=[
        *("shape", "no shards", "both", "no memory", "directory", "one file", "reshard"),
        *("model", "hardware", "ranks", "memory"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str) -> None:
    code, out, err = command("plan", *arguments)
    assert code == 2 and not out and err.startswith(f"fsdp-compile: error: {says}")
