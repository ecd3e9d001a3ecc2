"""Traces of real runs: each collective is named after its group, and took what the transport's bars say."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world, graphs_of
from hand_written_traces import GATHER, REDUCE, WAIT, Entry, bar, by_gloo, mark, step_on_gloo, write
from ranks import Ranks
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.fx import Graph
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import name_groups
from fsdp_compile.factory import MakeBatch, loss_of, shard
from fsdp_compile.measured_trace import Step, Trace, TraceError, _kind, steps
from fsdp_compile.passes import PassContext, announce
from fsdp_compile.passes.announce import ANNOUNCE
from fsdp_compile.passes.torch_compat import profiler_range
from fsdp_compile.planning import make_plan
from fsdp_compile.trace_compare import as_table, compare
from fsdp_compile.trace_file import write_trace

WIDTH = 256  # so large that gloo gathers weights alone, and biases beside them
EAGERLY = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def net() -> tuple[nn.Module, MakeBatch]:
    # With a gradient for the input, or a graph would not gather the first block again, which eager does.
    return Net(), lambda step, rank, world: torch.ones(8, WIDTH, requires_grad=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("simulated") / "plan.json"
    write_trace([make_plan(net, 2)], path)
    return path


def train(backend: str | None) -> profile:
    """Two profiled steps, after one that compiles."""
    model, make_batch = net()
    shard(model)
    step = model if backend is EAGERLY else torch.compile(model, backend=backend, fullgraph=True)
    loss_of(step(make_batch(0, 0, 2))).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(2):
            loss_of(step(make_batch(number, 0, 2))).backward()
    return profiler


def export(backend: str | None, directory: Path) -> None:
    train(backend).export_chrome_trace(str(directory / f"{torch.distributed.get_rank()}.json"))


def export_cached(directory: Path) -> int:
    """With what Inductor has compiled before; how many graphs it took from its cache."""
    with fresh_cache():
        train("inductor")
        torch.compiler.reset()
        counters.clear()
        export("inductor", directory)
    return int(counters["inductor"]["fxgraph_cache_hit"])


@pytest.mark.parametrize("backend", [EAGERLY, "fsdp_eager", "cached"])
def test_a_real_run_shows_what_was_planned(backend: str | None, ranks: Ranks, simulated: Path, tmp_path: Path) -> None:
    if backend == "cached":
        assert ranks.run(export_cached, tmp_path) == [2, 2]
    else:
        ranks.run(export, backend, tmp_path)
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        comparison = compare(simulated, path)
        assert comparison.counted == comparison.measured == 2, as_table(comparison)
        assert comparison.same_model, as_table(comparison)
        assert all(row.seconds for row in comparison.rows)
        assert 0 < comparison.measured_step < 10
        for step in steps(Trace(path)):
            assert_in_order(step, compiled=backend is not EAGERLY)
        check_names(path)


def assert_in_order(step: Step, compiled: bool) -> None:
    """As the snapshots of plans have it; eagerly each weight travels with its bias."""
    order = {(each.phase, each.title): len(each.launches) for each in step.collectives}
    gathers = ["blocks.0", "blocks.1", "root"] if compiled else ["root", "blocks.0", "blocks.1"]
    assert [title for phase, title in order if phase == "forward"] == [f"all_gather [{name}]" for name in gathers]
    assert order["forward", "all_gather [blocks.0]"] == (2 if compiled else 1)
    assert order["backward", "reduce_scatter [blocks.0]"] == 1
    for each in step.collectives:
        assert len(each.moves) == len(each.launches)
        assert 0 <= each.exposed <= each.seconds <= step.seconds


def check_names(path: Path) -> None:
    """The file with names is a trace still: what was there is there, and bars of a track nest."""
    before = json.loads(path.read_text())
    name_groups(path)
    once = path.read_text()
    name_groups(path)
    assert path.read_text() == once
    after = json.loads(once)
    assert after["traceEvents"][: len(before["traceEvents"])] == before["traceEvents"]
    added = [entry for entry in after["traceEvents"] if entry.get("cat") == "fsdp_compile" and entry["ph"] == "X"]
    assert {"all_gather [blocks.0]", "all_gather [root]", "reduce_scatter [blocks.1]"} <= {e["name"] for e in added}
    for entry in added:  # each is the bar of a transfer, in another process
        twins = [twin for twin in before["traceEvents"] if twin.get("name") == entry["args"]["transport"]]
        assert any(abs(twin["ts"] - entry["ts"]) < 1 and twin["tid"] == entry["tid"] for twin in twins)
        assert entry["dur"] >= 0 and entry["pid"] not in {twin["pid"] for twin in twins}


# -- what a graph says ------------------------------------------------------------------------------------------------


def graph_after(stage: str) -> Graph:
    with fake_world(2):
        model, make_batch = net()
        shard(model)
        return dict(graphs_of(model, make_batch(0, 0, 2)))[stage]


def test_a_graph_announces_its_launches_once() -> None:
    graph = graph_after("forward after")
    assert not graph.find_nodes(op="call_function", target=ANNOUNCE)
    reports = [announce(graph, PassContext()) for _ in range(2)]
    assert [report.changes for report in reports] == [1, 0]
    (node,) = graph.find_nodes(op="call_function", target=ANNOUNCE)
    assert node.args[1] == "fsdp_compile forward: all_gather [blocks.0]; all_gather [blocks.1]; all_gather [root]"


def test_a_graph_without_launches_announces_nothing() -> None:
    graph = Graph()
    graph.output(graph.placeholder("x"))
    assert announce(graph, PassContext()).changes == 0 and len(graph.nodes) == 2


def test_without_a_profiler_there_is_no_mark() -> None:
    assert isinstance(profiler_range("text"), nullcontext)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ANNOUNCE([torch.ones(1)], "fsdp_compile forward: x", [], [])
    assert "fsdp_compile forward: x" in {event.name for event in profiler.events()}


# -- written by hand --------------------------------------------------------------------------------------------------


def read(tmp_path: Path, entries: list[Entry]) -> list[Step]:
    return steps(Trace(write(tmp_path / "trace.json", entries)))


def test_parts_waits_and_steps_on_gloo(tmp_path: Path) -> None:
    late = [bar("aten::add", 60, 90)]  # an optimizer, which belongs to no step
    first, second = read(tmp_path, [*step_on_gloo(0), *late, *step_on_gloo(100, longer=5)])
    assert [step.seconds for step in (first, second)] == pytest.approx([49e-6, 54e-6])
    gather, reduction = first.collectives
    assert (gather.title, len(gather.launches), len(gather.moves)) == ("all_gather [a]", 2, 2)
    assert [gather.seconds, gather.exposed] == pytest.approx([10e-6, 4e-6])
    assert [reduction.seconds, reduction.exposed] == pytest.approx([20e-6, 8e-6])


def test_what_is_not_ours_gets_no_name(tmp_path: Path) -> None:
    """Transfers under way when the profiler started, collectives of the user's own, and steps that are cut off."""
    stray = [by_gloo("all_gather", -5, -1), bar("c10d::allreduce_", 2, 3), by_gloo("all_reduce", 3, 4)]
    cut = [mark("backward: reduce_scatter [a]", -9), bar(REDUCE, -8, -7)]
    own = [mark("forward: all_gather [a]", 0), bar(GATHER, 5, 6), by_gloo("all_gather", 6, 9)]
    back = [mark("backward: reduce_scatter [a]", 20), bar(REDUCE, 21, 22), by_gloo("all_reduce", 22, 25)]
    after = [bar("c10d::barrier", 30, 31), by_gloo("barrier", 31, 32)]
    (step,) = read(tmp_path, [*cut, *stray, *own, *back, *after])
    assert [(each.title, each.moves[0].begin) for each in step.collectives] == [
        ("all_gather [a]", pytest.approx(6e-6)),
        ("reduce_scatter [a]", pytest.approx(22e-6)),
    ]


def test_kernels_belong_to_the_operators_that_start_them(tmp_path: Path) -> None:
    """On a GPU: exposed is when no other kernel runs, and a step ends with the last kernel that it started."""
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    (step,) = read(
        tmp_path,
        [
            mark("forward: all_gather [a]", 0),
            *(bar(GATHER, 1, 5, number=10), bar("record_param_comms", 2, 4, number=11)),
            *(bar(nccl, 20, 40, "kernel", tid=24, number=11), bar("gemm", 10, 25, "kernel", tid=7, number=3)),
            *(bar(WAIT, 6, 7), bar("aten::mm", 8, 9, number=12), bar("gemm", 40, 50, "kernel", tid=7, number=12)),
            mark("backward: reduce_scatter [a]", 12),
            *(bar(REDUCE, 13, 14, number=13), bar(nccl, 45, 70, "kernel", tid=24, number=13)),
            *(bar("aten::mm", 15, 16, number=14), bar("gemm", 70, 80, "kernel", tid=7, number=14)),
            bar("other", 100, 900, "kernel", number=99),
        ],
    )
    gather, reduction = step.collectives
    assert [gather.seconds, gather.exposed] == pytest.approx([20e-6, 15e-6])
    assert [reduction.seconds, reduction.exposed] == pytest.approx([25e-6, 20e-6])
    assert step.seconds == pytest.approx(79e-6)


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "trace.json", step_on_gloo(0)).read_bytes()))
    name_groups(path)
    assert len(steps(Trace(path))) == 1
    assert b'"all_gather [a]"' in gzip.decompress(path.read_bytes())


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    whole = bytearray(gzip.compress(b'{"traceEvents": []}' * 50))
    whole[12:20] = b"\xff" * 8
    path.write_bytes(whole)
    with pytest.raises(TraceError, match="cannot read"):
        Trace(path)


def test_kinds_of_operators() -> None:
    names = ["_c10d_functional::all_gather_into_tensor", "fsdp_passes::gather", "gloo:all_gather", "c10d::allreduce_"]
    names += ["_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single", "c10d::broadcast_"]
    assert [_kind(name) for name in names] == [
        *("all_gather", "all_gather", "all_gather", "all_reduce"),
        *("reduce_scatter", "all_to_all", "broadcast"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot read"),
        (
            '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "pid": 1, "tid": 1, "dur": 1, "args": 3}]}',
            "not complete",
        ),
        ("[]", "has no list of traceEvents"),
        ('{"traceEvents": [3]}', "has no list of traceEvents"),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "a bar in it is not complete"),
        ('{"traceEvents": []}', "has no step"),
    ],
)
def test_no_trace(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        steps(Trace(path))
