"""What passes report, and what is simulated and written only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world, graphs_of, run_step
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from fsdp_compile import MixedPrecisionPolicy, backend, fully_shard
from fsdp_compile.passes import Effect, PassConfig, Report, evaluate, print_skeleton, stages
from fsdp_compile.passes.machine import cost_model

WIDTH = 8
STAGES = [
    *("joint_1_regather", "forward_backward_2_keep_slices", "forward_backward_3_accumulate"),
    *("forward_backward_4_bucket", "forward_backward_5_schedule", "forward_backward_6_dedup"),
    *("forward_backward_7_fuse_copies", "forward_backward_8_for_gloo", "forward_backward_9_announce"),
]


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Whatever a test chooses is undone."""
    with backend.configured():
        yield


def model() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(layers, mp_policy=policy)


def reports(rank: int = 0, **choices: Any) -> list[Report]:
    backend.configure(**choices)
    with fake_world(2, rank), backend.observed(lambda stage, graph: None) as found:
        run_step(torch.compile(model(), backend="fsdp_eager", fullgraph=True), torch.ones(3, WIDTH))
    return found


def test_copies_are_counted() -> None:
    """Four casts of parameters; of gradients four casts and two copies: one for each group."""
    forward, backward = (report for report in reports() if report.name == "fuse_copies")
    assert (forward.before.copies, forward.after.copies) == (4, 2)
    assert backward.before.copies - backward.after.copies == 4
    assert "copies 4 -> 2" in str(forward)


def test_nothing_is_simulated_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "simulate", lambda *_: pytest.fail("simulated"))
    assert all(report.step_before is None and report.step_after is None for report in reports())


def test_measured_steps() -> None:
    """A stage begins with what the one before it left; the last leaves what the simulation says of the result."""
    backend.configure(measure=True)
    seen: list[tuple[str, Graph]] = []
    with fake_world(2), backend.observed(lambda stage, graph: seen.append((stage, graph))) as found:
        run_step(torch.compile(model(), backend="fsdp_eager", fullgraph=True), torch.ones(3, WIDTH))
    steps = {report.name: (report.step_before, report.step_after) for report in found if report.name != "regather"}
    assert all(left == begins for (_, left), (begins, _) in pairwise(steps.values()))
    graphs = [dict(seen)["forward after"], dict(seen)["backward after"]]
    result = evaluate(graphs, cost_model(graphs, None))
    assert steps["fuse_copies"][1] == Effect(result.timeline.exposed_seconds, result.memory.peak)
    assert f"-> {result.timeline.exposed_seconds * 1e3:.3f} ms, peak" in str(found[-1])
    before, after = steps["bucket"]
    assert before is not None and after is not None and after.exposed < before.exposed


def test_replicas_are_measured_too() -> None:
    """The operator of an all-reduce does not say how many ranks take part; the process group does."""
    seen: list[Graph] = []
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replica", "shard"))
        backend.configure(measure=True)
        with backend.observed(lambda stage, graph: seen.append(graph)) as found:
            sharded = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
            run_step(torch.compile(sharded, backend="fsdp_eager", fullgraph=True), torch.ones(3, WIDTH))
        assert found[-1].step_after is not None and found[-1].after.all_reduces == 1
        costs = cost_model([seen[-1]], None)
    assert sorted(place.size for place in costs.groups.values()) == [2, 4]


@pytest.mark.parametrize(("replicas", "in_node"), [(2, {"shard": 8, "replica": 1}), (8, {"shard": 2, "replica": 4})])
def test_process_groups_are_where_their_ranks_are(replicas: int, in_node: dict[str, int]) -> None:
    """Of 16 ranks 8 share a node, so replicas of 8 shards talk between nodes, and of 2 within them too."""
    with fake_world(16):
        mesh = init_device_mesh("cpu", (replicas, 16 // replicas), mesh_dim_names=("replica", "shard"))
        graphs = dict(graphs_of(fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh), torch.ones(3, WIDTH)))
        places = cost_model([graphs["forward after"], graphs["backward after"]], "h100").groups.values()
    found = {"replica" if place.size == replicas else "shard": place.in_node for place in places}
    assert found == in_node


def test_dumped_stages(tmp_path: Path) -> None:
    for rank in range(2):
        reports(rank, dump=str(tmp_path / "graphs"))
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert names == sorted(f"rank{rank}_graph0.0_{stage}.txt" for rank in range(2) for stage in STAGES)


def test_a_dump_shows_what_a_pass_made(tmp_path: Path) -> None:
    backend.configure(dump=str(tmp_path))
    with fake_world(2):
        graphs = dict(graphs_of(model(), torch.ones(3, WIDTH)))
    (path,) = tmp_path.glob("*fuse_copies.txt")
    text = path.read_text()
    assert text.startswith("fuse_copies: 2 changes; gathers 2 -> 2")
    for stage in ("forward after", "backward after"):
        assert print_skeleton(graphs[stage]) in text and str(graphs[stage]) in text


def test_caches_do_not_depend_on_what_changes_no_graph() -> None:
    plain = PassConfig().digest()
    assert PassConfig(measure=True, dump="somewhere").digest() == plain
    assert PassConfig(schedule=False).digest() != plain
