"""``fsdp-compile explain``: what compiling does to a step, without ranks and without data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from command import command

from fsdp_compile import backend
from fsdp_compile.explain_step import explain_step
from fsdp_compile.factory import MakeBatch
from fsdp_compile.passes import PassConfig
from fsdp_compile.planning import make_plan

FACTORIES = """import torch
from torch import nn

class Prints(nn.Linear):
    def forward(self, x):
        print(end="")
        return super().forward(x)

class Asks(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y

class Net(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), last(8, 8)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))

def batch(step, rank, world): return torch.ones(2, 8)
def whole(): return Net(nn.Linear), batch
def prints(): return Net(Prints), batch
def asks(): return Net(Asks), batch
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(FACTORIES)
    return tmp_path / "models.py"


def test_one_graph_on_several_worlds(models: Path) -> None:
    code, out, err = command("explain", f"{models}:whole", "--mesh", "1x2,2x4", "--dtype", "float32")
    assert code == 0 and not err
    heading, _, rest = out.partition("\n\n")
    assert heading == f"{models}:whole on h100, float32, buckets: module"
    assert rest.startswith("2 ranks, sharded: each of the 2 modules")
    assert out.count("\ngraph 1, of ") == 2 and "\n8 ranks, 2 replicas, sharded: " in out
    assert out.count("3 all-reduces") == 0 and out.count("2 all-reduces") == 1


def test_a_graph_break_is_named(models: Path) -> None:
    code, out, _ = command("explain", f"{models}:prints")
    assert code == 0
    assert f"\ngraph break in blocks.1, {models}:6: " in out
    assert "\nblocks.0  in a graph\nblocks.1  in several graphs: graph break at " in out
    code, out, err = command("explain", f"{models}:prints", "--no-allow-graph-breaks")
    assert code == 2 and not out and err.endswith("models.py:6)\n")
    assert "models.py:prints does not compile into one graph: " in err


def test_where_data_are_needed_it_stops(models: Path) -> None:
    """What was captured until then is explained."""
    code, out, _ = command("explain", f"{models}:asks")
    assert code == 0
    assert f"\ngraph break in blocks.1, {models}:12: " in out and "\n  captured: 1 group" in out
    assert f"\nThe step stopped at {models}:12, which needs data: " in out
    assert "\nblocks.1  in several graphs" in out


def test_json(models: Path) -> None:
    code, out, _ = command("explain", f"{models}:whole", "--bucket", "none", "--json", "--hardware", "a100")
    (step,) = json.loads(out)
    (graph,) = step["explanation"]["graphs"]
    assert code == 0 and step["world_size"] == 8 and graph["summary"]["machine"] == "a100"
    forward, _ = graph["summary"]["parts"]
    members = [f"blocks.{index}.{name}" for index in range(2) for name in ("weight", "bias")]
    assert sorted(move["params"] for move in forward["moves"]) == sorted([name] for name in members)
    assert all(report["step_after"]["peak"] > 0 for report in graph["passes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["debugg"], "unknown model 'debugg'"),
        (["debug", "--world-size", "8", "--replicas", "3"], "8 ranks do not divide into 3 replicas"),
        (["debug", "--memory", "80GiB"], "unrecognized arguments: --memory 80GiB"),
    ],
    ids=["model", "replicas", "of plan alone"],
)
def test_bad_arguments(arguments: list[str], says: str) -> None:
    code, out, err = command("explain", *arguments)
    assert code == 2 and not out and err.startswith("fsdp-compile: error: ") and says in err


def net() -> tuple[nn.Module, MakeBatch]:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), lambda step, rank, world: torch.ones(2, 8)


def test_it_explains_what_plan_plans() -> None:
    before = backend.configuration()
    config = PassConfig(bucket="none", hardware="b200")
    plan, explained = make_plan(net, 4, config), explain_step(net, 4, config)
    assert backend.configuration() == before and not torch.distributed.is_initialized()
    (graph,) = explained.explanation.graphs
    assert graph.summary is not None
    assert tuple(part.traffic for part in graph.summary.parts) == plan.traffic
    assert graph.summary.seconds == pytest.approx(plan.result.timeline.seconds)
    assert graph.summary.peak == plan.result.memory.peak and explained.sharding == plan.sharding
